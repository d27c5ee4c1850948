"""Signs: what single metrics did, said with their numbers. Diagnoses (`stories`) are made of them.

A metric is compared with the run's own beginning, or with what it was some iterations before. None means that the sign
is not there, or that there is too little to tell yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from ppo_core.diagnostics.baseline import Baseline, Reference
from ppo_core.diagnostics.history import History, onset
from ppo_core.registry import metric
from ppo_core.spec import RunSpec

# A move counts from so many of the beginning's own median deviations on.
MOVED = 3.0


@dataclass(frozen=True)
class Sign:
    """One metric's part in a diagnosis. `onset` is the iteration from which it moved; None where that says nothing."""

    metric: str
    then: float | None
    now: float | None
    text: str
    onset: int | None = None

    def as_dict(self) -> dict[str, object]:
        """What an alert holds of it."""
        return {"metric": self.metric, "then": self.then, "now": self.now, "text": self.text}


@dataclass(frozen=True)
class Reading:
    """All that a diagnosis may look at."""

    spec: RunSpec
    iteration: int
    history: History
    baseline: Baseline

    @property
    def learning_for(self) -> int:
        """Iterations since the critic's warm-up."""
        return self.iteration - self.spec.update.critic_warmup_iterations

    def now(self, name: str) -> float | None:
        return self.history.now(name)

    def start(self, name: str) -> Reference | None:
        return self.baseline.start(name)

    def share(self, name: str, above: float, num: int) -> float | None:
        """Share of the last `num` values above a number; None before there are as many."""
        values = self.history.last(name, num)
        return sum(value > above for value in values) / num if len(values) == num else None

    def rose_by(self, name: str, factor: float = 1.0, difference: float = 0.0) -> Sign | None:
        """Above its beginning by more than a factor, a difference, and its own noise."""
        start, now = self.start(name), self.now(name)
        if start is None or now is None:
            return None
        then = start.median
        if now <= then * factor or now <= then + difference or now - then <= MOVED * start.mad:
            return None
        return self._moved(name, start, now, "rose")

    def fell_by(self, name: str, factor: float = 1.0, difference: float = 0.0) -> Sign | None:
        """Below its beginning by more than a factor, a difference, and its own noise."""
        start, now = self.start(name), self.now(name)
        if start is None or now is None:
            return None
        then = start.median
        if now >= then * factor or now >= then - difference or then - now <= MOVED * start.mad:
            return None
        return self._moved(name, start, now, "fell")

    def _moved(self, name: str, start: Reference, now: float, word: str) -> Sign:
        since = onset(self.history.smoothed(name), start.median, now, MOVED * start.mad)
        entry = metric(name)
        there = entry.with_unit(f"{now:.3g}")
        text = f"{entry.title} {word} from {start.median:.3g} to {there}, from iteration {since} on"
        return Sign(name, start.median, now, text, since)


def with_others(main: Sign | None, others: list[Sign | None], least: int) -> list[Sign]:
    """The evidence, where the main sign and at least so many others are there."""
    there = [sign for sign in others if sign is not None]
    return [main, *there] if main is not None and len(there) >= least else []
