"""A whole run with the vLLM engine, by changing one line of its spec."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_core.main import run_segment
from ppo_core.rollout.weights import PolicyWeights, Probe
from ppo_core.rundir import ExitCode
from tests.ppo_core.rollout.vllm_engines import SMALL, group_of
from tests.ppo_core.tiny_models import tiny_model
from tests.ppo_core.toy_run import TOKENS, journal, make_toy, toy_segment

pytestmark = pytest.mark.engines

ITERATIONS = 20
# float32, nats.
LARGEST_GAP = 1e-4
SMALLEST_MOVE = 0.05


def vllm_spec(folder: Path, iterations: int) -> dict[str, Any]:
    spec = make_toy(folder)
    policy = tiny_model("llama", vocab_size=TOKENS, head_dim=32, max_position_embeddings=128, initializer_range=0.05)
    policy.save_pretrained(folder / "policy")
    return spec | {
        "iterations": iterations,
        "update": {"learning_rate": 3e-3, "minibatches": 2},
        "rollout": {**spec["rollout"], "engine": "vllm", "vllm": SMALL},
        "checkpoints": {"every": 10},
    }


def test_twenty_iterations_with_weights_that_move_and_logprobs_that_agree(tmp_path: Path) -> None:
    said: list[torch.Tensor] = []
    pids: list[int] = []

    def change(trainer: Any) -> None:
        engine = trainer.models.engine
        said.append(trainer.models.trainer.probe().logprobs)
        pids.extend(engine.pids)
        plain = engine.sync_weights

        def sync_weights(weights: PolicyWeights, probe: Probe, version: int) -> Any:
            said.append(probe.logprobs)
            return plain(weights, probe, version)

        engine.sync_weights = sync_weights

    segment = toy_segment(tmp_path / "run", vllm_spec(tmp_path, ITERATIONS))
    assert run_segment(segment, token=1, attempt=1, change=change) == ExitCode.DONE
    moves = [float((after - before).abs().max()) for before, after in itertools.pairwise(said)]
    assert len(moves) == ITERATIONS
    assert min(moves) >= SMALLEST_MOVE
    told = [event for event in journal(segment, "metrics") if "rollout/engine_gap_max" in event.payload]
    assert [event.iteration for event in told] == list(range(1, ITERATIONS + 1))
    assert max(event.payload["rollout/engine_gap_max"] for event in told) < LARGEST_GAP
    assert not [member for pid in pids for member in group_of(pid)]


def test_a_run_whose_engine_is_killed_in_mid_rollout_ends_in_time_and_says_so(tmp_path: Path) -> None:
    segment = toy_segment(tmp_path / "run", vllm_spec(tmp_path, iterations=3))
    pids: list[int] = []
    killed_at: list[float] = []

    def change(trainer: Any) -> None:
        engine = trainer.models.engine
        pids.extend(engine.pids)
        plain = engine.generate

        def generate(prompt_ids: list[list[int]], **more: Any) -> Any:
            if engine.version == 1:  # the second iteration's
                os.kill(pids[0], signal.SIGKILL)
                killed_at.append(time.monotonic())
            return plain(prompt_ids, **more)

        engine.generate = generate

    assert run_segment(segment, token=1, attempt=1, change=change) == ExitCode.FAULT
    assert time.monotonic() - killed_at[0] < 5
    (end,) = journal(segment, "end")
    assert end.payload["error"]["code"] == "engine_lost"
    assert "was killed by SIGKILL; the end of its log" in end.payload["error"]["message"]
    assert end.iteration == 2
    assert not [member for pid in pids for member in group_of(pid)]
