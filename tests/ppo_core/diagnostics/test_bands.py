"""Whether a value is outside its band: bounds worked out by hand, in each way that bands are measured."""

from __future__ import annotations

import math

import pytest

from ppo_core.diagnostics.bands import Finding, band_of, finding, watched_bands
from ppo_core.diagnostics.baseline import Baseline
from ppo_core.diagnostics.history import History
from ppo_core.registry import METRICS
from ppo_core.spec.watching import AlertBand

WATCHED = watched_bands({})


def stand(name: str, values: list[float], learned: list[float] | None = None, **own: float) -> Finding:
    """Where the last of `values` stands, iteration by iteration from 1, after a baseline of `learned`."""
    bands = watched_bands({name: AlertBand(**own)} if own else {})
    history, baseline = History(), Baseline(200)
    for iteration, value in enumerate(values, start=1):
        history.add(iteration, name, value)
    for value in learned or []:
        baseline.learn(name, value)
    band = band_of(name, bands)
    assert band is not None
    return finding(name, band, history, baseline)


@pytest.mark.parametrize(("value", "level"), [(0.019, 0), (0.021, 1), (0.05, 1), (0.051, 2)])
def test_a_bound_of_the_value_itself(value: float, level: int) -> None:
    assert stand("policy/approx_kl", [value]).level == level


@pytest.mark.parametrize(("value", "level"), [(44.0, 0), (46.0, 1), (61.0, 2), (10.0, 0)])
def test_a_factor_of_the_baseline(value: float, level: int) -> None:
    """Length, usual is 30: outside from 45 up, red from 60."""
    found = stand("response/length_mean", [value], [29.0, 30.0, 31.0] * 10)
    assert (found.level, found.baseline) == (level, 30.0)
    assert found.bound == {0: None, 1: 45.0, 2: 60.0}[level]


def test_a_factor_within_the_runs_own_noise_is_none() -> None:
    """Lengths between 10 and 50: the median distance is 10, so that up to 30 + 30 is noise."""
    noisy = [10.0, 20.0, 30.0, 40.0, 50.0] * 6
    assert stand("response/length_mean", [59.0], noisy).level == 0
    assert stand("response/length_mean", [61.0], noisy).level == 2


@pytest.mark.parametrize(("value", "level"), [(0.96, 0), (0.9, 0), (0.86, 1), (0.7, 2)])
def test_a_distance_to_the_baseline_and_a_value_that_is_always_good(value: float, level: int) -> None:
    """EOS rate, usual is 0.92: outside below 0.87, red below 0.77; from 0.95 up it is well."""
    assert stand("response/eos_rate", [value], [0.91, 0.92, 0.93] * 10).level == level


@pytest.mark.parametrize(("value", "level"), [(1.8, 0), (2.0, 1), (0.1, 0)])
def test_deviations_from_the_baseline(value: float, level: int) -> None:
    """Gradient norm, usual is 1 ± 0.02, and no less than 0.15 counts as its deviation: outside from 1.9 up."""
    assert stand("policy/grad_norm", [value], [0.98, 1.0, 1.02] * 10).level == level


def test_without_a_baseline_nothing_is_outside_what_is_relative_to_it() -> None:
    assert stand("response/length_mean", [1e6], [30.0] * 19).level == 0


@pytest.mark.parametrize(
    ("kl", "level"),
    [
        ([6.0] * 60, 0),
        ([6.0] * 20 + [6 + 0.2 * step for step in range(41)], 1),  # 14 of 6, straight up
        ([6.0] * 20 + [6 * 1.04**step for step in range(41)], 2),  # 4.8 times, ever faster
        ([6.0] * 20 + [16 - 10 * 0.85**step for step in range(41)], 0),  # 2.6 times, and it has come to rest
        ([0.01 * 1.05**step for step in range(100)], 0),  # 7 times, and still next to nothing
    ],
)
def test_growth_of_the_kl_that_does_not_slow_down(kl: list[float], level: int) -> None:
    assert stand("kl/ref_sequence", kl).level == level


def test_explained_variance_is_an_alert_only_below_zero_for_twenty_iterations() -> None:
    name = "value/explained_variance_return"
    assert stand(name, [0.1] * 30).level == 0
    assert stand(name, [-0.1] * 19).level == 0
    assert stand(name, [-0.1] * 20).level == 2
    assert stand(name, [-0.1] * 19 + [0.01]).level == 0


def test_a_kl_a_little_below_zero_is_chance_and_a_clear_one_is_not() -> None:
    """k3 0.02 of 400 tokens: the standard error is sqrt(2 · 0.02 / 400) = 0.01; red is 0.01 below four of them."""
    band = WATCHED["kl/ref_token"]
    for value, level in ((-0.045, 0), (-0.055, 2), (0.3, 0)):
        history = History()
        for name, number in (("kl/ref_token", value), ("kl/ref_token_k3", 0.02), ("data/response_tokens", 400.0)):
            history.add(1, name, number)
        assert finding("kl/ref_token", band, history, Baseline(200)).level == level


def test_rounding_between_engine_and_trainer_is_no_gap() -> None:
    name = "rollout/engine_gap_mean"
    assert stand(name, [9e-4], [1e-7] * 20).level == 0
    assert stand(name, [4e-3], [1e-7] * 20).level == 1


def test_a_run_may_change_a_band_and_switch_one_off() -> None:
    assert stand("response/length_mean", [80.0], [30.0] * 20, high=3.0).level == 0
    assert stand("response/length_mean", [91.0], [30.0] * 20, high=3.0).level == 1
    assert stand("reward/score_std", [0.01], low=0.1).level == 1
    assert "policy/approx_kl" not in watched_bands({"policy/approx_kl": None})


@pytest.mark.parametrize(("value", "level"), [(0.5, 2), (1.5, 1), (2.5, 0), (3.5, 1), (4.5, 2)])
def test_each_bound_of_a_runs_own_band_counts(value: float, level: int) -> None:
    assert stand("reward/score_std", [value], red_low=1.0, low=2.0, high=3.0, red_high=4.0).level == level


def test_a_family_may_have_a_band_for_all_and_for_one() -> None:
    bands = watched_bands(
        {"policy/approx_kl/epoch_*": AlertBand(high=0.1), "policy/approx_kl/epoch_4": AlertBand(high=1.0)}
    )
    assert band_of("policy/approx_kl/epoch_2", bands).high == 0.1  # type: ignore[union-attr]
    assert band_of("policy/approx_kl/epoch_4", bands).high == 1.0  # type: ignore[union-attr]


def test_every_band_of_the_registry_is_watched_or_spoken_for() -> None:
    from ppo_core.diagnostics.bands import SPOKEN_FOR

    banded = {name for name, entry in METRICS.items() if entry.band is not None}
    assert banded == {*WATCHED, *SPOKEN_FOR}
    assert set(SPOKEN_FOR.values()) <= set(WATCHED)
    assert not any(math.isnan(bound) for band in WATCHED.values() for bound in (band.low, band.high) if bound)
