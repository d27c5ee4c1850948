"""Faults in vLLM's own process: a worker extension that does wrong what a file says, from the next sync on.

Each fault is one that vLLM or a loader could have; none is put into what the trainer's side does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ppo_core.rollout.vllm_worker import WeightReceiver
from ppo_core.rollout.weights import line_of
from tests.ppo_core.rollout.vllm_engines import FAULT_FILE

# Faults of rollouts leave the two rows of a sync's probe alone, which would find most of them before any rollout.
PROBE_ROWS = 2


class FaultyReceiver(WeightReceiver):
    """Right as long as the file is missing or empty."""

    def begin_receiving(self) -> None:
        fault = _fault()
        _set_prefix_fault(fault == "stale prefix")
        _set_answer_fault(fault == "answers in another order")
        _set_memory_fault(fault == "out of memory", self)
        _set_progress_fault(fault == "no token")
        _set_worker_fault(fault == "rows in another order", self)
        if fault == "ignores":
            self._note_and_go_on()
            return
        super().begin_receiving()
        if fault == "wrong bits":
            loaded = vars(self.get_model())["load_weights"]
            vars(self.get_model())["load_weights"] = lambda weights: loaded(_one_bit_off(weights))

    def _note_and_go_on(self) -> None:
        """It notes down what it is given to load, and goes on with what it had."""
        lines: list[str] = []
        self.received_lines = lines
        vars(self.get_model())["load_weights"] = lambda weights: lines.extend(line_of(*pair) for pair in weights)

    def load_pairs(self, load: Callable[..., Any], pairs: list[tuple[str, Tensor]]) -> Any:
        match _fault():
            case "half":
                pairs = pairs[: len(pairs) // 2]
            case "all but one part":  # a third of a fused map
                pairs = [pair for pair in pairs if not pair[0].endswith("layers.1.self_attn.k_proj.weight")]
            case "names swapped":
                renamed = {"up_proj": "gate_proj", "gate_proj": "up_proj"}
                pairs = [(_renamed(name, renamed), tensor) for name, tensor in pairs]
        return super().load_pairs(load, pairs)


def _fault() -> str:
    path = Path(os.environ[FAULT_FILE])
    return path.read_text() if path.exists() else ""


def _one_bit_off(weights: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    *pairs, (name, tensor) = weights
    return [*pairs, (name, torch.nextafter(tensor, tensor + 1))]


def _renamed(name: str, renamed: dict[str, str]) -> str:
    return ".".join(renamed.get(part, part) for part in name.split("."))


def _set_prefix_fault(wanted: bool) -> None:
    """Emptying the prefix cache says that it was done, and does nothing."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    _replace(KVCacheManager, "reset_prefix_cache", (lambda self: True) if wanted else None)


def _set_answer_fault(wanted: bool) -> None:
    """Answers that finish in the same step come back under each other's names."""
    from vllm.v1.engine.llm_engine import LLMEngine

    plain = _plain(LLMEngine, "step")

    def step(self: Any) -> list[Any]:
        outputs = plain(self)
        done = [output for output in outputs if output.finished]
        if len(done) <= PROBE_ROWS:
            return outputs
        for output, name in zip(done, [output.request_id for output in reversed(done)], strict=True):
            output.request_id = name
        return outputs

    _replace(LLMEngine, "step", step if wanted else None)


def _set_worker_fault(wanted: bool, worker: Any) -> None:
    """The worker's tokens, with their logprobs, are given to other rows than those that they were drawn for."""
    runner = worker.model_runner
    plain = _plain(type(runner), "sample_tokens")

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        output = plain(self, grammar_output)
        if len(output.req_ids) <= PROBE_ROWS:
            return output
        output.sampled_token_ids.reverse()
        if output.logprobs is not None:
            output.logprobs = output.logprobs._replace(
                logprob_token_ids=output.logprobs.logprob_token_ids[::-1],
                logprobs=output.logprobs.logprobs[::-1],
                sampled_token_ranks=output.logprobs.sampled_token_ranks[::-1],
            )
        return output

    _replace(type(runner), "sample_tokens", sample_tokens if wanted else None)


def _set_memory_fault(wanted: bool, worker: Any) -> None:
    """More than five rows at once are too many."""
    runner = worker.model_runner
    plain = _plain(type(runner), "execute_model")

    def execute_model(self: Any, scheduled: Any, *arguments: Any, **more: Any) -> Any:
        if len(scheduled.num_scheduled_tokens) > 5:
            raise torch.OutOfMemoryError("out of memory, said by a test")
        return plain(self, scheduled, *arguments, **more)

    _replace(type(runner), "execute_model", execute_model if wanted else None)


def _set_progress_fault(wanted: bool) -> None:
    """Steps go on, and no request of a rollout comes any further."""
    from vllm.v1.engine.llm_engine import LLMEngine

    plain = _plain(LLMEngine, "step")

    def step(self: Any) -> list[Any]:
        if self.get_num_unfinished_requests() <= PROBE_ROWS:
            return plain(self)
        time.sleep(0.01)
        return []

    if wanted:
        _replace(LLMEngine, "step", step)


def _plain(owner: type, name: str) -> Any:
    return getattr(owner, f"_plain_{name}", None) or getattr(owner, name)


def _replace(owner: type, name: str, method: Any) -> None:
    """Put a method in the place of another, or, with None, the other back."""
    plain = _plain(owner, name)
    setattr(owner, f"_plain_{name}", plain)
    setattr(owner, name, method or plain)
