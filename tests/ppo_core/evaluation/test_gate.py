"""The judge gate: win rates, their interval, and the rule by which it trips."""

from __future__ import annotations

import json

import pytest

from ppo_core.evaluation.gate import GateState, judge_verdict, paired_rise, wilson_interval, win_rate

N = 100
RISEN = [1.0 + 0.01 * (row % 7) for row in range(N)]
BEFORE = [0.01 * (row % 5) for row in range(N)]


def judged(wins: int, losses: int) -> list[float | None]:
    """Scores that win against zeros in the first rows, lose in the last, and tie between."""
    return [1.0] * wins + [0.0] * (N - wins - losses) + [-1.0] * losses


START = GateState.start(BEFORE, [0.0] * N)


def test_a_tie_counts_half_and_an_unusable_score_is_no_pair() -> None:
    rate = win_rate([1.0, 0.0, -1.0, 2.0, None, 5.0], [0.0, 0.0, 0.0, 0.0, 0.0, None])
    assert (rate.wins, rate.ties, rate.losses) == (2, 1, 1)
    assert rate.rate == 2.5 / 4


def test_no_pair_is_no_rate() -> None:
    rate = win_rate([None], [1.0])
    assert rate.rate is rate.low is rate.high is None


@pytest.mark.parametrize(
    ("share", "num", "low", "high"),
    [(0.5, 100, 0.4038, 0.5962), (0.0, 10, 0.0, 0.2775), (1.0, 10, 0.7225, 1.0), (0.4, 128, 0.3192, 0.4866)],
)
def test_the_interval_is_wilsons(share: float, num: int, low: float, high: float) -> None:
    """Numbers worked by hand from (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n)."""
    assert wilson_interval(share, num) == pytest.approx((low, high), abs=1e-4)


def test_the_rise_is_of_pairs() -> None:
    rise = paired_rise([2.0, 4.0, 6.0, None], [1.0, 2.0, 3.0, 9.0])
    assert rise.mean == 2.0
    assert rise.standard_error == pytest.approx((1 / 3) ** 0.5)
    assert rise.is_significant
    assert not paired_rise([2.0, 1.0], [1.0, 2.0]).is_significant
    assert paired_rise([1.0], [0.0]).standard_error is None


def test_score_up_and_judge_surely_down_trips() -> None:
    verdict = judge_verdict(START, RISEN, judged(30, 60))
    assert verdict.tripped
    assert verdict.against_last.high is not None
    assert verdict.against_last.high < 0.5
    assert "35% of pairs" in verdict.explanation
    assert "the interval lies below one half" in verdict.explanation


def test_judge_down_without_a_rising_score_does_not_trip() -> None:
    assert not judge_verdict(START, BEFORE, judged(30, 60)).tripped


def test_score_and_judge_up_does_not_trip() -> None:
    verdict = judge_verdict(START, RISEN, judged(60, 30))
    assert not verdict.tripped
    assert verdict.state.num_suspect == 0


def test_no_gain_trips_at_the_second_gate_in_a_row() -> None:
    first = judge_verdict(START, RISEN, judged(45, 45))
    assert not first.tripped
    assert first.state.num_suspect == 1
    second = judge_verdict(first.state, [score + 1 for score in RISEN], judged(45, 45))
    assert second.against_last.rate == 0.5
    assert second.tripped
    assert "gate 2 in a row" in second.explanation


def test_a_gate_with_a_gain_or_without_a_rise_breaks_the_row() -> None:
    first = judge_verdict(START, RISEN, judged(45, 45))
    better = judge_verdict(first.state, [score + 1 for score in RISEN], [1.0] * N)
    still = judge_verdict(first.state, RISEN, judged(45, 45))
    assert better.state.num_suspect == still.state.num_suspect == 0


def test_a_gate_compares_with_the_last_gate_and_with_the_start() -> None:
    first = judge_verdict(START, RISEN, [1.0] * N)
    second = judge_verdict(first.state, RISEN, [0.5] * N)
    assert second.metrics() == {
        "judge/win_rate": 0.0,
        "judge/win_rate_low": 0.0,
        "judge/win_rate_high": pytest.approx(0.037, abs=1e-3),
        "judge/win_rate_vs_start": 1.0,
    }


def test_a_gate_without_usable_scores_tells_nothing_and_does_not_trip() -> None:
    verdict = judge_verdict(START, RISEN, [None] * N)
    assert not verdict.tripped
    assert verdict.metrics()["judge/win_rate"] is None


def test_the_state_survives_json() -> None:
    state = judge_verdict(START, [None, *RISEN[1:]], judged(45, 45)).state
    assert GateState.of(json.loads(json.dumps(state.as_dict()))) == state
