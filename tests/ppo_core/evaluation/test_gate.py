"""The judge gate: win rates, their interval, and the rule by which it trips."""

from __future__ import annotations

import pytest

from ppo_core.evaluation.gate import Verdict, judge_verdict, paired_rise, wilson_interval, win_rate, win_rate_of

N = 100
RISEN = [1.0 + 0.01 * (row % 7) for row in range(N)]
BEFORE = [0.01 * (row % 5) for row in range(N)]


def judged(wins: int, losses: int) -> list[float | None]:
    """Scores that win against zeros in the first rows, lose in the last, and tie between."""
    return [1.0] * wins + [0.0] * (N - wins - losses) + [-1.0] * losses


NEVER_BETTER = [0.0] * N


def gate(scores: list[float], now: list[float | None], num_suspect: int = 0) -> Verdict:
    """A gate after the start, whose answers scored BEFORE and were all judged 0."""
    against = win_rate(now, NEVER_BETTER)
    return judge_verdict(paired_rise(scores, BEFORE), against, against, num_suspect)


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


@pytest.mark.parametrize(
    ("wins", "ties", "losses", "rate", "low", "high"),
    [
        (64, 0, 64, 0.5, 0.414652, 0.585348),
        (0, 128, 0, 0.5, 0.414652, 0.585348),
        (40, 48, 40, 0.5, 0.414652, 0.585348),
        (74, 0, 54, 0.578125, 0.491518, 0.660179),
        (50, 28, 50, 0.5, 0.414652, 0.585348),
        (75, 6, 47, 0.609375, 0.522846, 0.689530),
        (40, 20, 68, 0.390625, 0.310470, 0.477154),
        (0, 0, 128, 0.0, 0.0, 0.029137),
        (128, 0, 0, 1.0, 0.970863, 1.0),
        (0, 1, 0, 0.5, 0.054621, 0.945379),
    ],
)
def test_a_tie_is_half_a_success_in_the_interval(
    wins: int, ties: int, losses: int, rate: float, low: float, high: float
) -> None:
    """By hand from Wilson's formula, (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n), with p = (wins + ties/2) / n:
    at n = 128 z²/n is 0.0300114, so p = 1/2 gives 1/2 ± 1/2 · √(0.0300114 / 1.0300114), and p = 0 at most
    0.0300114 / 1.0300114."""
    found = win_rate_of([1.0] * wins + [0.0] * ties + [-1.0] * losses)
    assert (found.wins, found.ties, found.losses, found.rate) == (wins, ties, losses, rate)
    assert (found.low, found.high) == pytest.approx((low, high), abs=2e-6)


def test_a_pair_without_a_verdict_is_no_pair() -> None:
    found = win_rate_of([1.0, None, -1.0, None, 0.0, 1.0])
    assert (found.wins, found.ties, found.losses, found.rate) == (2, 1, 1, 2.5 / 4)


def test_score_up_and_judge_surely_down_trips() -> None:
    verdict = gate(RISEN, judged(30, 60))
    assert verdict.tripped
    assert verdict.against_last.high is not None
    assert verdict.against_last.high < 0.5
    assert "35% of pairs" in verdict.explanation
    assert "the interval lies below one half" in verdict.explanation


@pytest.mark.parametrize(("losses", "tripped"), [(58, True), (57, False)])
def test_the_interval_of_a_single_gate_decides_to_the_pair(losses: int, tripped: bool) -> None:
    """Of 100 pairs 38 won and 58 lost give 0.4 and at most 0.4980; 38 and 57 give 0.405 and at most 0.5030."""
    assert gate(RISEN, judged(38, losses)).tripped is tripped


def test_judge_down_without_a_rising_score_does_not_trip() -> None:
    assert not gate(BEFORE, judged(30, 60)).tripped


def test_score_and_judge_up_does_not_trip() -> None:
    verdict = gate(RISEN, judged(60, 30))
    assert not verdict.tripped
    assert verdict.num_suspect == 0


def test_no_gain_trips_at_the_second_gate_in_a_row() -> None:
    first = gate(RISEN, judged(45, 45))
    assert not first.tripped
    assert first.num_suspect == 1
    second = gate(RISEN, judged(45, 45), first.num_suspect)
    assert second.against_last.rate == 0.5
    assert second.tripped
    assert "gate 2 in a row" in second.explanation


def test_a_gate_with_a_gain_or_without_a_rise_breaks_the_row() -> None:
    assert gate(RISEN, [1.0] * N, num_suspect=1).num_suspect == 0
    assert gate(BEFORE, judged(45, 45), num_suspect=1).num_suspect == 0


def test_the_start_is_told_and_decides_nothing() -> None:
    lost, won = win_rate([0.5] * N, [1.0] * N), win_rate([0.5] * N, [0.0] * N)
    assert judge_verdict(paired_rise(RISEN, BEFORE), lost, won, 0).tripped
    assert not judge_verdict(paired_rise(RISEN, BEFORE), won, lost, 0).tripped
    assert judge_verdict(paired_rise(RISEN, RISEN), lost, won, 0).metrics() == {
        "judge/win_rate": 0.0,
        "judge/win_rate_low": 0.0,
        "judge/win_rate_high": pytest.approx(0.036995, abs=1e-5),
        "judge/win_rate_vs_start": 1.0,
        "judge/win_rate_vs_start_low": pytest.approx(0.963005, abs=1e-5),
        "judge/win_rate_vs_start_high": 1.0,
    }


def test_a_gate_without_usable_scores_tells_nothing_and_does_not_trip() -> None:
    verdict = gate(RISEN, [None] * N)
    assert not verdict.tripped
    assert verdict.metrics()["judge/win_rate"] is None
