"""An engine that says what it was told to: for tests of all that stands above the seam."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ppo_core.errors import RolloutError
from ppo_core.rollout.engine import Response, SyncReport
from ppo_core.rollout.weights import PolicyWeights, Probe, weights_digest


class ScriptedEngine:
    """Answers every prompt with the next response of its script, from the beginning again when it is used up."""

    def __init__(self, script: Iterable[Response], version: int = 0) -> None:
        self._script = list(script)
        self._next = 0
        self._version = version

    @property
    def version(self) -> int:
        return self._version

    @property
    def rows_at_once(self) -> int | None:
        return None

    def generate(
        self, prompt_ids: list[list[int]], *, seeds: list[int], check: Callable[[], None] | None = None
    ) -> list[Response]:
        if len(prompt_ids) != len(seeds):
            raise RolloutError(f"{len(prompt_ids)} prompts but {len(seeds)} seeds: every row needs its own")
        if not all(prompt_ids):
            raise RolloutError("a prompt has no token")
        if check is not None:
            check()
        said = [self._script[(self._next + row) % len(self._script)] for row in range(len(prompt_ids))]
        self._next += len(prompt_ids)
        return said

    def sync_weights(self, weights: PolicyWeights, probe: Probe, version: int) -> SyncReport:
        self._version = version
        return SyncReport(version, weights_digest(weights), 0.0)

    def rest(self) -> None:
        pass

    def close(self) -> None:
        pass


def response(ids: list[int], finish_reason: str = "stop") -> Response:
    """A response whose logprobs are all -1."""
    return Response(ids, finish_reason, [-1.0] * len(ids))  # type: ignore[arg-type]
