"""vLLM's engine inside its own process, driven step by step: generates, scores, takes over weights, checks itself.

It is the only module that calls vLLM's engine. It knows neither the trainer nor the connection to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ppo_core.rollout.cuda_ipc import handle_of
from ppo_core.rollout.stop_strings import StopStrings
from ppo_core.rollout.vllm_settings import CUDA_IPC

# vLLM's seeds have a sign, and -1 means none.
SEED_BITS = 63
# After which a row says how far it has come, so that an engine which makes none is not taken for one that goes on.
TOKENS_AN_OUTPUT = 32


class Refused(Exception):
    """What was asked cannot be done; `kind` is `weights` where the engine does not hold the weights it should."""

    def __init__(self, message: str, kind: str = "rollout") -> None:
        super().__init__(message)
        self.kind = kind


class Aborted(Exception):
    """The trainer no longer wants the answer."""


@dataclass
class _Begun:
    """A row's response as far as it has come."""

    row: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class EngineHost:
    """One vLLM engine and what it is known to hold.

    Args:
        settings: as `ppo_core.rollout.vllm_settings` makes them; the engine gets every one of them by name and
            fills in nothing from the model's folder.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        from transformers import AutoTokenizer
        from vllm import LLM

        self._settings = settings
        self._llm = LLM(**settings["engine"])
        self._engine = self._llm.llm_engine
        self._chunk_rows = int(settings["engine"]["max_num_seqs"])
        self._tokenizer = AutoTokenizer.from_pretrained(settings["engine"]["model"])
        self._verified: str | None = None  # the version whose weights it is known to hold
        self._is_asleep = False
        self._next_request = 0
        if settings["engine"]["weight_transfer_config"]["backend"] == CUDA_IPC:
            self._llm.init_weight_transfer_engine({"init_info": {"packed": True}})

    def generate(
        self,
        rows: list[dict[str, Any]],
        sampling: dict[str, Any],
        version: str,
        is_unwanted: Callable[[], bool],
        tell: Callable[[int], None],
    ) -> dict[str, Any]:
        """Sample one response a row.

        Args:
            rows: each with `row`, `prompt` (ids) and `seed`.
            sampling: `temperature`, `max_new_tokens`, `stop_ids` and `stop_strings`, for all of them.
            version: the weights that are to be sampled from.
            is_unwanted: looked at between steps.
            tell: called with the number of steps so far, about once a second while tokens are made.

        Returns:
            `rows`, each with `row`, the `prompt` that was answered, `ids`, `logprobs` and `finish_reason`; `version`;
            `chunk_rows`, how many are generated at once from now on.

        Raises:
            Refused: the weights are not verified or of another version, or vLLM gave what cannot be right.
            Aborted: it became unwanted.
        """
        self._require(version)
        found: list[dict[str, Any]] = []
        while len(found) < len(rows):
            chunk = rows[len(found) : len(found) + self._chunk_rows]
            try:
                found += self._generate(chunk, sampling, is_unwanted, tell)
            except torch.OutOfMemoryError:
                if len(chunk) == 1:
                    raise
                self._chunk_rows = len(chunk) // 2
                print(f"out of memory with {len(chunk)} rows: generating {self._chunk_rows} at a time", flush=True)
        self._require(version)
        return {"rows": found, "version": self._llm.get_weight_version(), "chunk_rows": self._chunk_rows}

    def last_logprobs(self, rows: list[list[int]], temperature: float) -> list[float]:
        """The logprob of each row's last token, given those before it: read through the cache, as sampling does."""
        outputs = self._run(
            [(ids[:-1], _params(temperature, 1, 0, logprob_token_ids=[ids[-1]], logprobs=None)) for ids in rows]
        )
        return [_last_logprob(output, ids[-1]) for output, ids in zip(outputs, rows, strict=True)]

    def begin_update(self) -> dict[str, Any]:
        """Forget the weights and get ready for others. Asleep, the memory for weights comes back first, no other."""
        self._verified = None
        if self._is_asleep:
            self._llm.wake_up(tags=["weights"])
        self._llm.collective_rpc("begin_receiving")
        self._llm.start_weight_update()
        return {}

    def update(self, part: dict[str, Any]) -> dict[str, Any]:
        """Load some of the weights."""
        if "ipc_handles" in part:
            part = {**part, "ipc_handles": {gpu: handle_of(said) for gpu, said in part["ipc_handles"].items()}}
        self._llm.update_weights({"update_info": part})
        return {}

    def finish_update(self, version: str) -> dict[str, Any]:
        """All weights were sent: they get their label.

        Returns:
            `digest` and `num_tensors` of what the engine's workers received.

        Raises:
            Refused: a weight of the model's own did not arrive whole, or workers received different things.
        """
        self._llm.finish_weight_update(weight_version=version)
        workers = self._llm.collective_rpc("end_receiving")
        return received(workers, version)

    def fingerprint(self) -> dict[str, Any]:
        """SHA-256 of everything that each worker computes with."""
        return {"workers": self._llm.collective_rpc("weights_fingerprint")}

    def examine(self, probe: list[list[int]]) -> dict[str, Any]:
        """Empty the prefix cache, wake what still sleeps, and say what is there now.

        Args:
            probe: rows of ids.

        Returns:
            `version` as read back, `probe`: the logprobs of all but the first token of each row, and of the canary
            `canary_gap` and `num_cached`.

        Raises:
            Refused: the prefix cache cannot be emptied, or the engine does not wake up.
        """
        if not self._llm.reset_prefix_cache():
            raise Refused("the prefix cache cannot be emptied", "weights")
        if self._is_asleep:
            if not self._llm.wake_up(tags=["kv_cache"]):
                raise Refused("the engine does not wake up")
            self._is_asleep = False
        return {"version": self._llm.get_weight_version(), "probe": self._prompt_logprobs(probe), **self._canary()}

    def rest(self) -> dict[str, Any]:
        """Give up weights and cache with their memory, until the next update."""
        self._verified = None
        self._llm.sleep(level=2)
        self._is_asleep = True
        return {}

    def accept(self, version: str) -> dict[str, Any]:
        """The trainer has compared what `examine` said: rows may be generated."""
        if self._llm.get_weight_version() != version:
            raise Refused(f"version {version} is not what is held: {self._llm.get_weight_version()}", "weights")
        self._verified = version
        return {"version": version}

    def _canary(self) -> dict[str, Any]:
        """Whether states of other weights are still read: a row long enough to be cached, asked for by both routes.

        It is cached when this returns, so that the next sync would find it if the cache were not emptied.
        """
        row: list[int] = self._settings["canary"]
        params = _params(1.0, 1, 0, logprob_token_ids=[row[-1]], logprobs=None)
        (cached,) = self._run([(row[:-1], params)])
        (whole,) = self._prompt_logprobs([row])
        gap = abs(_last_logprob(cached, row[-1]) - whole[-1])
        return {"num_cached": cached.num_cached_tokens or 0, "canary_gap": gap}

    def _prompt_logprobs(self, rows: list[list[int]]) -> list[list[float]]:
        """Of every token of each row but the first; such requests read nothing from the prefix cache."""
        outputs = self._run([(ids, _params(1.0, 1, 0, prompt_logprobs=0)) for ids in rows])
        return [
            [said[token].logprob for said, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
            for output, ids in zip(outputs, rows, strict=True)
        ]

    def _generate(
        self,
        rows: list[dict[str, Any]],
        sampling: dict[str, Any],
        is_unwanted: Callable[[], bool],
        tell: Callable[[int], None],
    ) -> list[dict[str, Any]]:
        stop_strings = StopStrings(self._tokenizer, sampling["stop_strings"])
        begun: dict[str, _Begun] = {}
        for row in rows:
            params = _params(
                sampling["temperature"],
                sampling["max_new_tokens"],
                row["seed"],
                stop_token_ids=sampling["stop_ids"],
                interval=1 if stop_strings else TOKENS_AN_OUTPUT,
            )
            begun[self._add(row["prompt"], params)] = _Begun(row["row"])
        found: dict[str, dict[str, Any]] = {}
        told, num_steps, is_news = time.monotonic(), 0, False
        try:
            while len(found) < len(rows):
                if is_unwanted():
                    raise Aborted
                for output in self._engine.step():
                    is_news = True
                    ended = self._ended(output, begun[output.request_id], stop_strings)
                    if ended is not None:
                        found[output.request_id] = ended
                num_steps += 1
                if is_news and time.monotonic() - told > 1:
                    told, is_news = time.monotonic(), False
                    tell(num_steps)
        finally:
            self._engine.abort_request([name for name in begun if name not in found])
        return [found[name] for name in begun]

    def _ended(self, output: Any, begun: _Begun, stop_strings: StopStrings) -> dict[str, Any] | None:
        """What a request has come to, once it is over; None before. `begun` takes over the tokens that are new."""
        (completion,) = output.outputs
        new = completion.token_ids
        begun.ids += new
        begun.logprobs += [said[token].logprob for said, token in zip(completion.logprobs or [], new, strict=True)]
        if stop_strings and stop_strings.just_appeared(begun.ids):
            if not output.finished:
                self._engine.abort_request([output.request_id])
            reason = "stop"
        elif output.finished:
            reason = completion.finish_reason
        else:
            return None
        return {
            "row": begun.row,
            "prompt": list(output.prompt_token_ids),
            "ids": begun.ids,
            "logprobs": begun.logprobs,
            "finish_reason": reason,
        }

    def _require(self, version: str) -> None:
        held = self._llm.get_weight_version()
        if self._verified != version or held != version:
            raise Refused(
                f"asked for policy version {version}, but the engine holds {held!r}, verified is {self._verified!r}",
                "weights",
            )

    def _run(self, requests: list[tuple[list[int], Any]]) -> list[Any]:
        """The outputs of a few short requests, in order."""
        names = [self._add(prompt, params) for prompt, params in requests]
        found: dict[str, Any] = {}
        while len(found) < len(names):
            found |= {output.request_id: output for output in self._engine.step() if output.finished}
        for name, (prompt, _) in zip(names, requests, strict=True):
            if list(found[name].prompt_token_ids) != prompt:
                raise Refused(f"vLLM answered prompt {found[name].prompt_token_ids[:8]} where {prompt[:8]} was asked")
        return [found[name] for name in names]

    def _add(self, prompt: list[int], params: Any) -> str:
        self._next_request += 1
        name = str(self._next_request)
        (given,) = self._engine.renderer.render_cmpl([{"prompt_token_ids": prompt}])
        self._engine.add_request(name, given, params)
        return name


def received(workers: list[dict[str, Any]], version: str) -> dict[str, Any]:
    """`digest` and `num_tensors` of what every worker received, as each of them says.

    Raises:
        Refused: a weight of the model's own did not arrive whole, or workers received different things.
    """
    for worker in workers:
        lost = worker["not_loaded"]
        if lost:
            raise Refused(
                f"version {version}: received weights of digest {worker['digest']}, but {len(lost)} of the model's "
                f"own did not arrive whole, {lost[0]} among them",
                "weights",
            )
        if worker != workers[0]:
            raise Refused(f"workers received {workers[0]['digest']} and {worker['digest']}", "weights")
    return {"digest": workers[0]["digest"], "num_tensors": workers[0]["num_tensors"]}


def _params(
    temperature: float,
    max_tokens: int,
    seed: int,
    *,
    stop_token_ids: list[int] | None = None,
    interval: int | None = None,
    **more: Any,
) -> Any:
    """Every setting by name: what is left out here is vLLM's choice, not ours."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        **{
            "n": 1,
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "seed": folded_seed(seed),
            "stop": None,
            "stop_token_ids": stop_token_ids or [],
            "ignore_eos": True,  # The ids above are all that end a response.
            "min_tokens": 0,
            "max_tokens": max_tokens,
            "logprobs": 0,
            "prompt_logprobs": None,
            "detokenize": False,
            "output_kind": RequestOutputKind.FINAL_ONLY if interval is None else RequestOutputKind.DELTA,
            "stream_interval": interval,
            **more,
        }
    )


def _last_logprob(output: Any, token: int) -> float:
    """What an output says of the one token that it was asked about."""
    said = output.outputs[0].logprobs[0]
    if token not in said:
        raise Refused(
            f"vLLM was asked about id {token} and told of {list(said)}: its responses are not those of their rows"
        )
    logprob: float = said[token].logprob
    return logprob


def folded_seed(seed: int) -> int:
    """A seed that vLLM takes. On a processor the generator reads the low 32 bits alone: the high ones go into them."""
    return (seed ^ (seed >> 32)) & ((1 << SEED_BITS) - 1)
