"""What is usual for a run: medians and deviations worked out by hand, and the same after a restart."""

from __future__ import annotations

import json

import pytest

from ppo_core.diagnostics.baseline import Baseline, Reference, baseline_iterations, reference_of
from ppo_core.diagnostics.history import History, onset


def learned(num: int, values: list[float]) -> Baseline:
    baseline = Baseline(num)
    for value in values:
        baseline.learn("m", value)
    return baseline


@pytest.mark.parametrize(
    ("iterations", "asked", "num"),
    [(10_000, None, 200), (800, None, 200), (400, None, 100), (60, None, 20), (6, None, 20), (400, 33, 33)],
)
def test_a_run_learns_from_200_or_a_quarter_and_at_least_20(iterations: int, asked: int | None, num: int) -> None:
    assert baseline_iterations(iterations, asked) == num


def test_median_and_deviation_by_hand() -> None:
    assert reference_of([3.0, 1.0, 10.0, 2.0, 4.0]) == Reference(3.0, 1.0)
    assert reference_of([1.0, 2.0, 3.0, 10.0]) == Reference(2.5, 1.0)  # distances 1.5 0.5 0.5 7.5


def test_it_speaks_from_20_values_on_and_stops_learning_at_its_number() -> None:
    assert learned(30, [1.0] * 19).whole("m") is None
    assert learned(30, [1.0] * 20).whole("m") == Reference(1.0, 0.0)
    # Of 1 to 30 alone, whatever follows.
    assert learned(30, [float(value) for value in [*range(1, 31), *[1000] * 50]]).whole("m") == Reference(15.5, 7.5)


def test_the_start_is_of_the_first_ten_alone() -> None:
    assert learned(30, [1.0] * 9).start("m") is None
    assert learned(30, [1.0] * 10 + [9.0] * 20).start("m") == Reference(1.0, 0.0)


def test_it_goes_on_after_json_to_the_last_bit() -> None:
    values = [0.1 * value**1.5 for value in range(40)]
    straight = learned(30, values)
    again = Baseline.of(30, json.loads(json.dumps(learned(30, values[:17]).as_dict())))
    for value in values[17:]:
        again.learn("m", value)
    assert again.as_dict() == straight.as_dict()
    assert again.whole("m") == straight.whole("m")


def test_under_a_smaller_number_later_values_go() -> None:
    kept = learned(40, [1.0] * 20 + [5.0] * 20).as_dict()
    assert Baseline.of(20, kept).whole("m") == Reference(1.0, 0.0)


def test_the_onset_is_the_first_iteration_of_the_way_there() -> None:
    pairs = [(at, value) for at, value in enumerate([1.0, 1.1, 0.9, 1.0, 1.8, 2.6, 3.0], start=1)]
    assert onset(pairs, 1.0, 3.0) == 5
    assert onset([(at, -value) for at, value in pairs], -1.0, -3.0) == 5
    assert onset(pairs, 1.0, 3.0, noise=1.0) == 6
    # A bump that was gone again is not where it began.
    assert onset([(1, 3.0), (2, 3.0), (3, 1.0), (4, 1.0), (5, 3.0)], 1.0, 3.0) == 5
    assert onset([(4, 3.0), (5, 3.0)], 1.0, 3.0) == 4


def test_history_forgets_what_is_older_than_a_hundred_iterations() -> None:
    history = History()
    for iteration in range(1, 251):
        history.add(iteration, "m", float(iteration))
    assert history.series("m")[0] == (151, 151.0)
    assert history.now("m") == 248.0
    assert history.before("m", 40) == 208.0
    assert history.before("m", 98) is None
    assert History.of(json.loads(json.dumps(history.as_dict()))).as_dict() == history.as_dict()
    (points,) = history.snapshot(["m", "m", "unknown"], 151).values()
    assert len(points) == 30
    assert (points[0], points[-1]) == ([151, 151.0], [250, 250.0])
