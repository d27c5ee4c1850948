"""The last values of the metrics that are watched: what bands, diagnoses and snapshots look back on.

It holds what the journal holds, so that what is found can be found again from a journal. Undefined and non-finite
values leave a gap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

KEPT = 100  # iterations
# Single values are noisy: what a metric "is now" is the median of its last few.
SMOOTHED = 5
MOST_POINTS = 30


class History:
    """By metric the pairs of iteration and value, oldest first, of at most the last `KEPT` iterations."""

    def __init__(self, series: dict[str, list[tuple[int, float]]] | None = None) -> None:
        self._series = series or {}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> History:
        return cls(
            {name: list(zip(kept["iterations"], kept["values"], strict=True)) for name, kept in document.items()}
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            name: {"iterations": [at for at, _ in pairs], "values": [value for _, value in pairs]}
            for name, pairs in self._series.items()
        }

    def add(self, iteration: int, name: str, value: float) -> None:
        pairs = self._series.setdefault(name, [])
        pairs.append((iteration, value))
        while pairs[0][0] <= iteration - KEPT:
            pairs.pop(0)

    def series(self, name: str) -> list[tuple[int, float]]:
        return self._series.get(name, [])

    def last(self, name: str, num: int = 1) -> list[float]:
        """Up to `num` newest values, oldest first."""
        return [value for _, value in self.series(name)[-num:]]

    def now(self, name: str) -> float | None:
        """Median of the last few values; None before there are as many."""
        values = self.last(name, SMOOTHED)
        return median(values) if len(values) == SMOOTHED else None

    def before(self, name: str, iterations: int) -> float | None:
        """What `now` was so many iterations ago; None where it is not kept."""
        pairs = self.series(name)
        values = [value for at, value in pairs if at <= pairs[-1][0] - iterations][-SMOOTHED:] if pairs else []
        return median(values) if len(values) == SMOOTHED else None

    def smoothed(self, name: str) -> list[tuple[int, float]]:
        """The series, each value the median of itself and its two neighbours."""
        pairs = self.series(name)
        return [
            (at, median(value for _, value in pairs[max(0, place - 1) : place + 2]))
            for place, (at, _) in enumerate(pairs)
        ]

    def snapshot(self, names: Iterable[str], first: int) -> dict[str, list[list[float]]]:
        """`[iteration, value]` of these metrics from iteration `first` on, thinned to `MOST_POINTS`, the ends kept."""
        found = {}
        for name in dict.fromkeys(names):
            pairs = [[at, value] for at, value in self.series(name) if at >= first]
            if len(pairs) > MOST_POINTS:
                step = (len(pairs) - 1) / (MOST_POINTS - 1)
                pairs = [pairs[round(place * step)] for place in range(MOST_POINTS)]
            if pairs:
                found[name] = pairs
        return found


def onset(pairs: list[tuple[int, float]], then: float, now: float, noise: float = 0.0) -> int:
    """The first iteration from which a metric has been on its way from `then` to `now`, looked for backwards.

    That is the one after the last whose value lay within a quarter of the way, or within `noise` of `then`.

    Args:
        pairs: iteration and value, oldest first, at least one.

    Example: 1 1 1 2 3 at iterations 1 to 5, from 1 to 3, give 4.
    """
    near = max(abs(now - then) / 4, noise)
    for at, value in reversed(pairs):
        on_its_way = (value - then) * (1 if now >= then else -1) > near
        if not on_its_way:
            return min(at + 1, pairs[-1][0])
    return pairs[0][0]
