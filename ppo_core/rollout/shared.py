"""One rollout engine for all ranks of a run, made of the engines that ranks hold: each generates its share of the rows.

Seeds go with the rows, so a response is the same whichever rank makes it. It knows no kind of engine.
"""

from __future__ import annotations

from collections.abc import Callable

from ppo_core.errors import RolloutError
from ppo_core.ranks import Ranks
from ppo_core.rollout.engine import Response, RolloutEngine, SyncReport
from ppo_core.rollout.weights import PolicyWeights, Probe


class SharedEngine:
    """Made of what `make` returns on each rank: its engine, or None where others generate for it. Rank 0 has one."""

    def __init__(self, make: Callable[[], RolloutEngine | None], ranks: Ranks) -> None:
        self._own: RolloutEngine | None = None
        self._ranks = ranks
        self._rows_at_once: int | None = None

        def make_own() -> int | None:
            self._own = make()
            return None if self._own is None else self._own.version

        try:
            versions = ranks.together(make_own)
        except BaseException:
            self.close()
            raise
        self._holders = [rank for rank, version in enumerate(versions) if version is not None]
        self._version = next(version for version in versions if version is not None)

    @property
    def version(self) -> int:
        return self._version

    @property
    def rows_at_once(self) -> int | None:
        return self._rows_at_once

    def rows_of(self, rank: int, num_rows: int) -> range:
        """Which rows of a batch that rank generates."""
        if rank not in self._holders:
            return range(0)
        return range(self._holders.index(rank), num_rows, len(self._holders))

    def generate(
        self, prompt_ids: list[list[int]], *, seeds: list[int], check: Callable[[], None] | None = None
    ) -> list[Response]:
        if len(prompt_ids) != len(seeds):
            raise RolloutError(f"{len(prompt_ids)} prompts but {len(seeds)} seeds: every row needs its own")
        num_rows = len(prompt_ids)
        own_rows = self.rows_of(self._ranks.rank, num_rows)

        def share() -> tuple[list[Response], int | None]:
            if self._own is None or not own_rows:
                return [], None
            some = [prompt_ids[row] for row in own_rows]
            responses = self._own.generate(some, seeds=[seeds[row] for row in own_rows], check=check)
            return responses, self._own.rows_at_once

        by_row: dict[int, Response] = {}
        shares = self._ranks.together(share)
        if any(at_once is not None for _, at_once in shares):
            self._rows_at_once = sum(len(own) if at_once is None else min(len(own), at_once) for own, at_once in shares)
        for rank, (responses, _) in enumerate(shares):
            rows = self.rows_of(rank, num_rows)
            if len(responses) != len(rows):
                raise RolloutError(f"rank {rank} returned {len(responses)} responses to {len(rows)} prompts")
            by_row.update(zip(rows, responses, strict=True))
        return [by_row[row] for row in range(num_rows)]

    def sync_weights(self, weights: PolicyWeights, probe: Probe, version: int) -> SyncReport:
        def sync() -> SyncReport | None:
            if self._own is not None:
                return self._own.sync_weights(weights, probe, version)
            for _ in weights:  # Making them whole may take every rank.
                pass
            return None

        reports = self._ranks.together(sync)
        report = next(each for each in reports if each is not None)
        self._version = report.version
        return report

    def rest(self) -> None:
        own = self._own
        self._ranks.together(lambda: own.rest() if own is not None else None)

    def close(self) -> None:
        if self._own is not None:
            self._own.close()
