"""The groups of a run spec that say how a run is watched: alert bands, what alerts do, the checks before it starts."""

from __future__ import annotations

import difflib
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, model_validator

from ppo_core.registry import METRICS, metric
from ppo_core.spec.setting import Group, Misfits, setting

Action = Literal["note", "pause", "stop"]


def _exists(name: str) -> str:
    try:
        metric(name)
    except KeyError:
        near = difflib.get_close_matches(name, METRICS, n=1)
        group = name.split("/")[0] + "/"
        known = [each for each in METRICS if each.startswith(group)] or sorted(
            {f"{each.split('/')[0]}/…" for each in METRICS}
        )
        remedy = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
        raise Misfits([("", f"no metric is called {name!r}; {remedy}")]) from None
    return name


# Checked as the key that it is, so that a name and the bounds of another band are told at once.
MetricName = Annotated[str, AfterValidator(_exists)]


class AlertBand(Group):
    """Another band for one metric. Bounds are measured as the metric's own are (docs/metrics.md): its value, or its
    factor, distance or deviations to what it is compared with. A bound that is left out leaves its side open."""

    low: float | None = setting(None, "rollback", "Healthy from here up.", ge=-1e12, le=1e12)
    high: float | None = setting(None, "rollback", "Healthy up to here.", ge=-1e12, le=1e12)
    red_low: float | None = setting(None, "rollback", "Critical below this.", ge=-1e12, le=1e12)
    red_high: float | None = setting(None, "rollback", "Critical above this.", ge=-1e12, le=1e12)

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> Self:
        named = {"red_low": self.red_low, "low": self.low, "high": self.high, "red_high": self.red_high}
        given = [(name, value) for name, value in named.items() if value is not None]
        if not given:
            raise Misfits([("", "a band without a bound watches nothing; give one, or null to switch the metric off")])
        misfits = [
            (f"/{name}", f"{name} is {value:g} but {before} is {least:g}; order them red_low, low, high, red_high")
            for (before, least), (name, value) in pairwise(given)
            if value < least
        ]
        if misfits:
            raise Misfits(misfits)
        return self


class AlertsConfig(Group):
    """What is watched while the run trains, and what an alert does; docs/diagnosis.md says what each of them means."""

    baseline_iterations: int | None = setting(
        None,
        "rollback",
        "First iterations, after the critic's warm-up, from which the run learns what is usual for it; null: 200, in a "
        "shorter run a quarter of it, and at least 20.",
        ge=20,
        le=1000,
    )
    bands: dict[MetricName, AlertBand | None] = setting(
        {},
        "rollback",
        "Other bands by metric, such as `response/length_mean: {high: 2.0}`; null switches a metric's alerts off.",
        max_length=100,
    )
    on_warning: Action = setting("note", "rollback", "What a metric outside its band does to the run.")
    on_critical: Action = setting("note", "rollback", "What a metric in the red does to the run.")
    on_story: Action = setting(
        "note", "rollback", "What a diagnosis (several signs that have one cause) does to the run."
    )


class PreflightConfig(Group):
    """What is tried before iteration 1 of a run, so that a fault shows before anything is spent."""

    enabled: bool = setting(True, "rollback", "Whether the checks are made; docs/diagnosis.md lists them.")
    audit_answers: int = setting(
        200,
        "rollback",
        "Answers that the reward is audited on: score against length, against an answer's own beginning, and spread a "
        "prompt; 0 switches the audit off.",
        ge=0,
        le=2000,
    )
