"""Whether a metric is in its band: the registry's bands, or the run's own, against history and baseline.

A band has two layers. Its bounds are absolute, or relative to what is usual for the run; and where they are relative,
a value counts as outside only if it also lies farther from the baseline's median than the run's own noise reaches.
Pure functions of the metrics that a journal holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ppo_core.diagnostics.baseline import Baseline
from ppo_core.diagnostics.history import History
from ppo_core.registry import METRICS, Band, metric
from ppo_core.spec.watching import AlertBand

Level = Literal[0, 1, 2]  # healthy, outside, in the red

# A factor or a distance to the baseline counts from so many median deviations on: less is this run's noise.
NOISE_DEVIATIONS = 3.0
# A deviation is taken as no smaller than this share of the median: a metric that hardly moved while it was learned
# would otherwise be outside for ever.
LEAST_DEVIATION = 0.15
KL_BACK = 40  # iterations
# Nats a response. Every policy that learns leaves its reference: from 0 any growth is without measure, and up to here
# it says nothing.
KL_FLOOR = 5.0
# Nats. Below it engine and trainer differ by rounding, however many times that was smaller before.
GAP_FLOOR = 1e-3
# Standard errors by which a KL has to be below 0. That of the mean of k1 over n tokens is about sqrt(2 k3 / n).
CHANCE = 4.0

# Bands that are drawn, and raise no alert by themselves: another metric of the same matter does.
SPOKEN_FOR = {
    "kl/ref_sequence_k3": "kl/ref_sequence",
    "policy/approx_kl/epoch_*": "policy/approx_kl",
    "policy/clip_fraction/epoch_*": "policy/clip_fraction",
    "rollout/engine_gap_max": "rollout/engine_gap_mean",
    "rollout/engine_gap_k3": "rollout/engine_gap_mean",
    "value/explained_variance": "value/explained_variance_return",
}
# Sides that many healthy runs leave: small steps clip little, and gradients shrink as a run comes to rest.
NOT_LOW = ("policy/clip_fraction", "policy/grad_norm", "value/grad_norm")
# Of these only the red is an alert: a score that nobody could foresee leaves a good critic below the healthy range.
RED_ONLY = ("value/explained_variance_return", "kl/ref_token")


@dataclass(frozen=True)
class Finding:
    """Where a metric stands: `level`, and the value, what it is compared with, and the bound, all in its own unit.

    `value` is None where it was not finite, which is always red; `baseline` and `bound` where there is none, or where
    none was crossed.
    """

    level: Level
    value: float | None
    baseline: float | None = None
    bound: float | None = None
    noise: float = 0.0  #: how far values lie from the baseline by chance


def watched_bands(overrides: Mapping[str, AlertBand | None]) -> dict[str, Band]:
    """By registry key the bands that raise alerts: those of the registry, changed and switched off as the run wants."""
    found = {
        name: _quieter(name, entry.band)
        for name, entry in METRICS.items()
        if entry.band is not None and name not in SPOKEN_FOR
    }
    for name, own in overrides.items():
        found.pop(name, None)
        if own is not None:
            bounds = own.model_dump()
            found[name] = replace(metric(name).band or Band(""), **bounds, text="The run's own.", good_from=None)
    return found


def band_of(name: str, bands: Mapping[str, Band]) -> Band | None:
    """The band of a metric, or of its family; None where it is not watched."""
    return bands.get(name) or bands.get(metric(name).name)


def finding(name: str, band: Band, history: History, baseline: Baseline) -> Finding:
    """Where the newest value of a metric stands. Without what it is compared with, it is healthy."""
    value = history.last(name)[-1]
    if band.good_from is not None and value >= band.good_from:
        return Finding(0, value)
    if band.relative_to == "40 iterations before":
        return _growth(name, band, history, baseline)
    if band.relative_to == "baseline":
        return _against_baseline(name, band, value, baseline)
    return _absolute(name, band, value, history)


def _quieter(name: str, band: Band) -> Band:
    if name in NOT_LOW:
        band = replace(band, low=None, red_low=None)
    if name in RED_ONLY:
        band = replace(band, low=None, high=None)
    return band


def _absolute(name: str, band: Band, value: float, history: History) -> Finding:
    allowed = _chance(name, history)
    level, bound = _outside(value + allowed if value < 0 else value, band)
    if level and bound in (band.red_low, band.red_high) and band.red_iterations > 1:
        last = history.last(name, band.red_iterations)
        if len(last) < band.red_iterations or any(_outside(each, band)[0] < 2 for each in last):
            return Finding(0, value)
    return Finding(level, value, None, bound)


def _chance(name: str, history: History) -> float:
    """How far below 0 a mean of k1 may lie by chance."""
    if name != "kl/ref_token":
        return 0.0
    k3, tokens = history.last("kl/ref_token_k3"), history.last("data/response_tokens")
    return CHANCE * math.sqrt(2 * max(k3[-1], 0.0) / tokens[-1]) if k3 and tokens and tokens[-1] else 0.0


def _against_baseline(name: str, band: Band, value: float, baseline: Baseline) -> Finding:
    usual = baseline.whole(name)
    if usual is None:
        return Finding(0, value)
    middle, mad = usual.median, usual.mad
    if band.measure == "mad":
        mad = max(mad, LEAST_DEVIATION * abs(middle))
        if mad == 0:
            return Finding(0, value, middle)
        level, crossed = _outside((value - middle) / mad, band)
        bound = None if crossed is None else middle + crossed * mad
    elif band.measure == "factor":
        floored = max(middle, _floor(name))
        if floored <= 0:
            return Finding(0, value, middle)
        level, crossed = _outside(value / floored, band)
        bound = None if crossed is None else crossed * floored
    else:
        level, crossed = _outside(value - middle, band)
        bound = None if crossed is None else middle + crossed
    noise = 0.0 if band.measure == "mad" else NOISE_DEVIATIONS * mad
    if abs(value - middle) <= noise:
        return Finding(0, value, middle, None, noise)
    return Finding(level, value, middle, bound, noise)


def _growth(name: str, band: Band, history: History, baseline: Baseline) -> Finding:
    """Against 40 iterations before, as long as the growth does not slow down by itself.

    Before there are 40, against the run's beginning.
    """
    value = history.last(name)[-1]
    now = history.now(name)
    then, middle = history.before(name, KL_BACK), history.before(name, KL_BACK // 2)
    start = baseline.start(name)
    if then is None and start is not None:
        then = start.median
        pairs = history.series(name)
        half = (pairs[-1][0] - pairs[0][0]) // 2
        middle = history.before(name, half) if half else None
    if now is None or then is None or middle is None:
        return Finding(0, value)
    then = max(then, KL_FLOOR) if name.startswith("kl/ref_sequence") else then
    if then <= 0:
        return Finding(0, value)
    level, crossed = _outside(now / then, band)
    slows_down = now - middle < (middle - then) * 0.75
    if not level or slows_down:
        return Finding(0, value, then)
    return Finding(level, value, then, None if crossed is None else crossed * then)


def _floor(name: str) -> float:
    return GAP_FLOOR if name.startswith("rollout/engine_gap") else 0.0


def _outside(measured: float, band: Band) -> tuple[Level, float | None]:
    """The level, and the bound that was crossed."""
    if band.red_low is not None and measured < band.red_low:
        return 2, band.red_low
    if band.red_high is not None and measured > band.red_high:
        return 2, band.red_high
    if band.low is not None and measured < band.low:
        return 1, band.low
    if band.high is not None and measured > band.high:
        return 1, band.high
    return 0, None
