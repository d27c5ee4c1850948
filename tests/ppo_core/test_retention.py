"""Retention: hand-worked cases and properties over random histories."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_core.retention import Kept, decisions, removable
from ppo_core.spec.groups import CheckpointsConfig


@dataclass(frozen=True)
class Rules:
    keep_last: int = 1
    keep_every: int | None = None
    keep_best: int = 0


def at(iteration: int, segment: int = 1, **fields: object) -> Kept:
    base = Kept(f"s{segment}-i{iteration}", segment, iteration, verified=True)
    return replace(base, **fields)  # type: ignore[arg-type]


def gone(checkpoints: list[Kept], rules: Rules) -> list[tuple[int, int]]:
    return [(removal.segment, removal.iteration) for removal in removable(checkpoints, rules)]


histories = st.lists(
    st.builds(
        Kept,
        id=st.just(""),
        segment=st.integers(1, 3),
        iteration=st.integers(0, 120),
        verified=st.sampled_from([True, True, False, None]),
        pinned=st.booleans(),
        judge_score=st.none() | st.floats(allow_infinity=True, allow_nan=True),
        protected_reason=st.none() | st.just("segment 2 starts from it"),
    ),
    max_size=12,
    unique_by=lambda kept: (kept.segment, kept.iteration),
).map(lambda found: [replace(kept, id=f"k{number}") for number, kept in enumerate(found)])
all_rules = st.builds(
    Rules,
    keep_last=st.integers(1, 4) | st.just(-1),
    keep_every=st.none() | st.integers(1, 50),
    keep_best=st.integers(0, 3),
)


def test_last_ones_are_counted_as_numbers() -> None:
    """9 < 10 < 100, which the names 'iter-9', 'iter-10', 'iter-100' would not say."""
    assert gone([at(100), at(9), at(10)], Rules(keep_last=2)) == [(1, 9)]


def test_a_later_segment_is_newer_than_a_higher_iteration() -> None:
    assert gone([at(90), at(100), at(20, segment=2)], Rules(keep_last=1)) == [(1, 90), (1, 100)]


def test_every_nth_stays() -> None:
    assert gone([at(n) for n in (10, 20, 30, 40, 50)], Rules(keep_last=1, keep_every=20)) == [(1, 10), (1, 30)]


def test_the_judges_best_stays_and_of_equals_the_newer() -> None:
    history = [at(10, judge_score=0.7), at(20, judge_score=0.7), at(30, judge_score=0.2), at(40)]
    assert gone(history, Rules(keep_last=1, keep_best=1)) == [(1, 10), (1, 30)]


def test_nan_is_never_the_judges_best() -> None:
    history = [at(10, judge_score=float("nan")), at(20, judge_score=-1.0), at(30)]
    assert gone(history, Rules(keep_last=1, keep_best=1)) == [(1, 10)]


def test_pinned_and_used_ones_stay_with_their_reason() -> None:
    history = [at(10, pinned=True), at(20, protected_reason="segment 2 starts from it"), at(30), at(40)]
    assert gone(history, Rules()) == [(1, 30)]
    reasons = {d.checkpoint.iteration: d.reasons for d in decisions(history, Rules())}
    assert reasons[10] == ("pinned",)
    assert reasons[20] == ("segment 2 starts from it",)
    assert reasons[30] == ("no rule keeps it; a newer one is verified",)


def test_nothing_goes_while_the_newer_one_is_not_verified() -> None:
    assert gone([at(10), at(20, verified=None)], Rules(keep_last=1)) == []
    assert gone([at(10), at(20)], Rules(keep_last=1)) == [(1, 10)]


def test_a_damaged_newest_takes_no_place_among_the_last() -> None:
    history = [at(10), at(20), at(30, verified=False)]
    assert gone(history, Rules(keep_last=1)) == [(1, 10)]
    assert "no newer checkpoint" in decisions(history, Rules())[0].reasons[0]


def test_a_damaged_one_goes_once_a_newer_is_verified() -> None:
    removals = removable([at(10, verified=False), at(20)], Rules(keep_last=3))
    assert [(r.iteration, r.reason) for r in removals] == [(10, "damaged, and a newer one is verified")]


def test_minus_one_keeps_all() -> None:
    assert gone([at(n) for n in range(5)], Rules(keep_last=-1)) == []


def test_the_specs_group_is_such_a_set_of_rules() -> None:
    history = [at(n) for n in (20, 40, 60, 80)]
    assert [r.iteration for r in removable(history, CheckpointsConfig())] == [20]


def test_two_records_of_one_id_are_refused() -> None:
    with pytest.raises(ValueError, match="one id"):
        removable([at(1), replace(at(2), id=at(1).id)], Rules())


@given(histories, all_rules)
def test_the_newest_good_one_never_goes(history: list[Kept], rules: Rules) -> None:
    good = [kept for kept in history if kept.verified]
    if good:
        newest = max(good, key=lambda kept: (kept.segment, kept.iteration))
        assert newest.id not in {removal.id for removal in removable(history, rules)}


@given(histories, all_rules)
def test_whatever_goes_has_a_newer_verified_one(history: list[Kept], rules: Rules) -> None:
    for removal in removable(history, rules):
        place = (removal.segment, removal.iteration)
        assert any(kept.verified and (kept.segment, kept.iteration) > place for kept in history)


@given(histories, all_rules)
def test_pinned_and_protected_never_go(history: list[Kept], rules: Rules) -> None:
    going = {removal.id for removal in removable(history, rules)}
    assert not [k for k in history if k.id in going and (k.pinned or k.protected_reason)]


@given(histories, all_rules)
def test_removing_and_looking_again_removes_nothing_more(history: list[Kept], rules: Rules) -> None:
    going = {removal.id for removal in removable(history, rules)}
    assert removable([kept for kept in history if kept.id not in going], rules) == []


@given(histories, all_rules)
def test_every_checkpoint_has_a_reason_and_order_is_no_matter(history: list[Kept], rules: Rules) -> None:
    decided = decisions(history, rules)
    assert len(decided) == len(history)
    assert all(decision.reasons for decision in decided)
    assert decided == decisions(history[::-1], rules)


@given(histories, all_rules)
def test_enough_verified_ones_stay_for_keep_last(history: list[Kept], rules: Rules) -> None:
    sound = sorted((k for k in history if k.verified is not False), key=lambda k: (k.segment, k.iteration))
    expected = sound if rules.keep_last < 0 else sound[-rules.keep_last :]
    going = {removal.id for removal in removable(history, rules)}
    assert not [kept for kept in expected if kept.id in going]
