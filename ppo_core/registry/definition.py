"""What the registry says about a metric: the record and the band, with no metric in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Panel = Literal["reward", "kl", "policy", "value", "generation", "entropy", "evaluation", "system"]
Direction = Literal["higher", "lower", "none"]
When = Literal["iteration", "evaluation", "gate", "if used"]
Reference = Literal["baseline", "40 iterations before"]
Measure = Literal["value", "factor", "difference", "mad"]

PANELS: dict[Panel, str] = {
    "reward": "Reward",
    "kl": "KL to the reference",
    "policy": "Policy update",
    "value": "Value",
    "generation": "Generation",
    "entropy": "Entropy",
    "evaluation": "Evaluation",
    "system": "System",
}


@dataclass(frozen=True)
class Band:
    """Where a metric is healthy, and where it is red; between the two it is a warning.

    These are heuristics to start from, not laws: a run may override them. `low` and `high` bound the healthy range,
    `red_low` and `red_high` begin the red ones; None leaves a side open. They bound the metric itself (`measure`
    "value"), or, with `relative_to`, its quotient ("factor"), its distance ("difference"), or its distance in median
    absolute deviations ("mad") to what it is compared with. `baseline` is the run's own first iterations.
    """

    text: str
    low: float | None = None
    high: float | None = None
    red_low: float | None = None
    red_high: float | None = None
    relative_to: Reference | None = None
    measure: Measure = "value"
    good_from: float | None = None  # From this value up the metric is healthy, whatever it is compared with.
    red_iterations: int = 1  # It is red only after so many iterations in a row beyond the red bound.

    @property
    def measured(self) -> str:
        """What the bounds are bounds of, in words."""
        if self.relative_to is None:
            return "the value itself"
        other = "the run's baseline" if self.relative_to == "baseline" else "its value of 40 iterations before"
        return {
            "value": "the value itself",
            "factor": f"the factor to {other}",
            "difference": f"the distance to {other}",
            "mad": f"the distance to {other} in median deviations",
        }[self.measure]

    @property
    def bounds(self) -> dict[str, float]:
        """The bounds that there are, by name, from the lowest on."""
        named = {"red_low": self.red_low, "low": self.low, "high": self.high, "red_high": self.red_high}
        return {name: bound for name, bound in named.items() if bound is not None}


@dataclass(frozen=True)
class Metric:
    """One metric, said once for charts, tooltips, docs, API and alert rules.

    A `name` that ends in `*` stands for a family: the star is a number or a word that is known only in the run.
    `formula` and `weighting` are in words; `legal` is the range outside which the number itself is wrong (None: an
    open end); `meaning` says what it means when the metric leaves its band, `remedy` what to do then. `when` says
    which metrics events hold it: every iteration's, those with an evaluation or a gate, or only where the spec or the
    iteration has what it counts. An undefined value is null, never 0.
    """

    name: str
    title: str
    panel: Panel
    formula: str
    unit: str
    weighting: str
    meaning: str
    remedy: str
    legal: tuple[float | None, float | None] | None = None
    band: Band | None = None
    direction: Direction = "none"
    when: When = "iteration"

    def with_unit(self, number: str) -> str:
        """A number of this metric in a sentence: `53.3 tokens`; shares and quotients stand alone."""
        return number if self.unit in ("share", "1") else f"{number} {self.unit}"
