"""One reward for all ranks of a run: rank 0 scores, and every rank learns what it found.

Functions, services and reward models are so asked once, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ppo_core.ranks import Ranks
from ppo_core.scoring.combine import Reward, Scores
from ppo_core.scoring.source import not_asked_to_end


class BatchScorer(Protocol):
    """Scores whole batches: a `Reward`, or one that several ranks share."""

    def score(
        self, prompts: Sequence[str], responses: Sequence[str], check: Callable[[], None] = not_asked_to_end
    ) -> Scores:
        """Score every response to its prompt; what `check` raises, called while it waits, ends it.

        Raises:
            RewardError: too many responses have no usable score.
        """
        ...

    def close(self) -> None:
        """End its processes."""
        ...


class SharedReward:
    """Loads its reward on rank 0 only."""

    def __init__(self, load: Callable[[], Reward], ranks: Ranks) -> None:
        self._ranks = ranks
        #: Rank 0's; None elsewhere.
        self.own: Reward | None = None

        def load_it() -> None:
            self.own = load()

        ranks.first(load_it)

    def score(
        self, prompts: Sequence[str], responses: Sequence[str], check: Callable[[], None] = not_asked_to_end
    ) -> Scores:
        return self._ranks.first(lambda: self._first().score(prompts, responses, check))

    def close(self) -> None:
        if self.own is not None:
            self.own.close()

    def _first(self) -> Reward:
        assert self.own is not None  # Only rank 0 is asked.
        return self.own
