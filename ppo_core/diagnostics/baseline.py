"""What is usual for this run: the median of a metric's first values, and how far they lie from it.

A baseline is learned while the run trains, from its own first iterations, and is kept in checkpoints with every value
that it was made of: after a restart or a roll back it is the same to the last bit. It knows neither bands nor alerts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

# A median of fewer values is too loose to raise an alert by.
MIN_VALUES = 20
# The run's very beginning, which diagnoses compare with: few, so that what drifts from the first iteration on shows.
START_VALUES = 10
MOST_ITERATIONS = 200


@dataclass(frozen=True)
class Reference:
    """Median of a metric's values, and the median distance from it (MAD), in the metric's unit."""

    median: float
    mad: float


def reference_of(values: list[float]) -> Reference:
    """Median and median absolute deviation of at least one value.

    Example: 1 2 3 4 10 give median 3 and deviation 1.
    """
    middle = median(values)
    return Reference(middle, median(abs(value - middle) for value in values))


def baseline_iterations(iterations: int, asked: int | None) -> int:
    """From how many first iterations a run learns: `asked`, or 200, in a shorter run a quarter, and at least 20."""
    return asked if asked is not None else min(MOST_ITERATIONS, max(MIN_VALUES, iterations // 4))


class Baseline:
    """First values of each metric, as many as it learns from.

    From `MIN_VALUES` on it speaks, though it goes on learning: else a long run would be watched by half in the
    iterations in which most goes wrong.
    """

    def __init__(self, num_iterations: int, values: dict[str, list[float]] | None = None) -> None:
        self.num_iterations = num_iterations
        self._values = values or {}
        self._found: dict[tuple[str, int], Reference] = {}

    @classmethod
    def of(cls, num_iterations: int, document: Mapping[str, Any]) -> Baseline:
        """Take over a checkpoint's. Where the run learns from another number now, more follow, or later ones go."""
        return cls(num_iterations, {name: list(values[:num_iterations]) for name, values in document.items()})

    def as_dict(self) -> dict[str, Any]:
        return {name: list(values) for name, values in self._values.items()}

    def learn(self, name: str, value: float) -> None:
        """One more value of an iteration, if it is among the first."""
        values = self._values.setdefault(name, [])
        if len(values) < self.num_iterations:
            values.append(value)

    def whole(self, name: str) -> Reference | None:
        """Of all values learned so far; None before there are enough."""
        return self._reference(name, len(self._values.get(name, ())), MIN_VALUES)

    def start(self, name: str) -> Reference | None:
        """Of the run's first ten; None before they are there."""
        return self._reference(name, min(START_VALUES, len(self._values.get(name, ()))), START_VALUES)

    def first(self, name: str) -> float | None:
        """The least of the first three values, before anything can have moved far; None before they are there."""
        values = self._values.get(name, [])[:3]
        return min(values) if len(values) == 3 else None

    def _reference(self, name: str, num: int, least: int) -> Reference | None:
        if num < least:
            return None
        if (name, num) not in self._found:
            self._found[name, num] = reference_of(self._values[name][:num])
        return self._found[name, num]
