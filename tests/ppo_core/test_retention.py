"""Retention: hand-worked cases and properties over random histories."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_core.retention import History, Kept, OnlyWhatIsNeeded, Stretch, decisions, removable
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


# Segment 2 left segment 1 behind at `left`, segment 3 left segment 2 behind; or the first is still the present one.
lines = st.integers(0, 60).flatmap(
    lambda left: st.sampled_from(
        [
            (Stretch(1, 0, 10**9),),
            (Stretch(1, 0, left), Stretch(2, left + 1, 10**9)),
            (Stretch(1, 0, left), Stretch(2, left + 1, left + 30), Stretch(3, left + 31, 10**9)),
            (Stretch(1, 0, left), Stretch(3, left + 1, 10**9)),
        ]
    )
)
pasts = st.builds(
    History,
    line=lines,
    gates=st.lists(st.integers(0, 120), max_size=4).map(tuple),
    onsets=st.lists(st.integers(0, 120), max_size=3).map(tuple),
    left=st.lists(st.integers(1, 2), max_size=2).map(tuple),
)


def on_line(kept: Kept, past: History) -> bool:
    return any(kept.segment == s.segment and s.first <= kept.iteration <= s.last for s in past.line)


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


FROM_THE_START = (Stretch(1, 0, 10**9),)


def test_the_last_two_gates_keep_the_newest_at_or_before_them() -> None:
    """Gates at 25, 50 and 75: 75 may just have tripped, 50 is the one to go back to."""
    history = [at(n) for n in (20, 40, 50, 60, 70, 80, 90)]
    past = History(FROM_THE_START, gates=(75, 25, 50))
    assert [r.iteration for r in removable(history, Rules(), past)] == [20, 40, 60, 80]
    reasons = {d.checkpoint.iteration: d.reasons for d in decisions(history, Rules(), past)}
    assert reasons[50] == ("the newest at the gate of iteration 50",)
    assert reasons[70] == ("the newest at the gate of iteration 75",)


def test_an_open_alert_keeps_the_newest_from_before_it_began() -> None:
    """What was saved at the onset has the trouble in it already."""
    history = [at(n) for n in (10, 20, 30, 40)]
    past = History(FROM_THE_START, onsets=(30,))
    assert [r.iteration for r in removable(history, Rules(), past)] == [10, 30]
    (kept,) = [d for d in decisions(history, Rules(), past) if d.checkpoint.iteration == 20]
    assert kept.reasons == ("the newest before the alert that began at iteration 30",)


def test_moments_look_along_the_present_line_only() -> None:
    """Segment 2 went on from 20; segment 1's 40 belongs to what was left behind."""
    history = [at(20), at(40), at(45, segment=2), at(90, segment=2)]
    line = (Stretch(1, 0, 20), Stretch(2, 21, 10**9))
    assert [(r.segment, r.iteration) for r in removable(history, Rules(), History(line, gates=(42,)))] == [
        (1, 40),
        (2, 45),
    ]


def test_the_end_of_what_a_roll_back_left_stays_to_undo_it() -> None:
    """Segment 2 went back to 20 and left 30 and 40; a new segment's checkpoints push out all of it but the end."""
    history = [at(20), at(30), at(40), at(30, segment=2), at(40, segment=2)]
    past = History((Stretch(1, 0, 20), Stretch(2, 21, 10**9)), left=(1,))
    assert [(r.segment, r.iteration) for r in removable(history, Rules(), past)] == [(1, 20), (1, 30), (2, 30)]
    (kept,) = [d for d in decisions(history, Rules(), past) if d.checkpoint == at(40)]
    assert kept.reasons == ("the end of segment 1, which a roll back left",)


def test_a_roll_back_to_the_very_end_leaves_nothing_to_go_back_to() -> None:
    history = [at(10), at(20), at(30, segment=2), at(40, segment=2)]
    past = History((Stretch(1, 0, 20), Stretch(2, 21, 10**9)), left=(1,))
    assert [(r.segment, r.iteration) for r in removable(history, Rules(), past)] == [(1, 10), (1, 20), (2, 30)]


def test_at_a_moment_a_damaged_one_counts_for_nothing_and_an_unverified_one_not_alone() -> None:
    history = [at(10), at(20), at(30, verified=None), at(40, verified=False), at(50), at(60)]
    past = History(FROM_THE_START, onsets=(45,))
    assert [r.iteration for r in removable(history, Rules(), past)] == [10, 40, 50]


def test_a_person_is_held_by_what_is_needed_and_not_by_the_rules() -> None:
    history = [at(10, judge_score=1.0), at(20, pinned=True), at(30), at(40)]
    going = {r.iteration for r in removable(history, OnlyWhatIsNeeded(), History(FROM_THE_START, gates=(30,)))}
    assert going == {10}


@given(histories, all_rules, pasts)
def test_the_newest_sound_one_of_the_last_gates_and_before_every_onset_never_goes(
    history: list[Kept], rules: Rules, past: History
) -> None:
    going = {removal.id for removal in removable(history, rules, past)}
    sound = [kept for kept in history if kept.verified is not False and on_line(kept, past)]
    for moment in [*sorted(set(past.gates))[-2:], *(onset - 1 for onset in past.onsets)]:
        before = [kept for kept in sound if kept.iteration <= moment]
        for choice in (before, [kept for kept in before if kept.verified]):
            if choice:
                assert max(choice, key=lambda kept: (kept.segment, kept.iteration)).id not in going


@given(histories, all_rules, pasts)
def test_the_best_never_go(history: list[Kept], rules: Rules, past: History) -> None:
    """Of the sound ones with a score, at least `keep_best` stay, and none that goes is better than one of them."""
    going = {removal.id for removal in removable(history, rules, past)}
    scored = [
        kept
        for kept in history
        if kept.verified is not False and kept.judge_score is not None and kept.judge_score == kept.judge_score
    ]
    scored.sort(key=lambda kept: (kept.judge_score, kept.segment, kept.iteration), reverse=True)
    assert not [kept for kept in scored[: rules.keep_best] if kept.id in going]


@given(histories, all_rules, pasts, st.data())
def test_keeping_more_never_removes_more(history: list[Kept], rules: Rules, past: History, data: st.DataObject) -> None:
    more = Rules(
        keep_last=-1 if rules.keep_last < 0 else rules.keep_last + data.draw(st.integers(0, 3)),
        keep_every=rules.keep_every or data.draw(st.none() | st.integers(1, 50)),
        keep_best=rules.keep_best + data.draw(st.integers(0, 3)),
    )
    pinned = [replace(kept, pinned=kept.pinned or data.draw(st.booleans())) for kept in history]
    onsets = (*past.onsets, *data.draw(st.lists(st.integers(0, 120), max_size=2)))
    less = {removal.id for removal in removable(pinned, more, replace(past, onsets=onsets))}
    assert less <= {removal.id for removal in removable(history, rules, past)}


@given(histories, all_rules, pasts)
def test_a_damaged_one_changes_nothing_for_the_others(history: list[Kept], rules: Rules, past: History) -> None:
    sound = [kept for kept in history if kept.verified is not False]
    going = {removal.id for removal in removable(history, rules, past)}
    assert going & {kept.id for kept in sound} == {removal.id for removal in removable(sound, rules, past)}


@given(histories, pasts)
def test_whatever_a_rule_removes_a_person_may_delete(history: list[Kept], past: History) -> None:
    free = {removal.id for removal in removable(history, OnlyWhatIsNeeded(), past)}
    assert {removal.id for removal in removable(history, Rules(keep_last=1), past)} <= free


@given(histories, all_rules, pasts)
def test_the_newest_good_one_never_goes(history: list[Kept], rules: Rules, past: History) -> None:
    good = [kept for kept in history if kept.verified]
    if good:
        newest = max(good, key=lambda kept: (kept.segment, kept.iteration))
        assert newest.id not in {removal.id for removal in removable(history, rules, past)}


@given(histories, all_rules, pasts)
def test_whatever_goes_has_a_newer_verified_one(history: list[Kept], rules: Rules, past: History) -> None:
    for removal in removable(history, rules, past):
        place = (removal.segment, removal.iteration)
        assert any(kept.verified and (kept.segment, kept.iteration) > place for kept in history)


@given(histories, all_rules, pasts)
def test_pinned_and_protected_never_go(history: list[Kept], rules: Rules, past: History) -> None:
    going = {removal.id for removal in removable(history, rules, past)}
    assert not [k for k in history if k.id in going and (k.pinned or k.protected_reason)]


@given(histories, all_rules, pasts)
def test_removing_and_looking_again_removes_nothing_more(history: list[Kept], rules: Rules, past: History) -> None:
    going = {removal.id for removal in removable(history, rules, past)}
    assert removable([kept for kept in history if kept.id not in going], rules, past) == []


@given(histories, all_rules, pasts)
def test_every_checkpoint_has_a_reason_and_order_is_no_matter(history: list[Kept], rules: Rules, past: History) -> None:
    decided = decisions(history, rules, past)
    assert len(decided) == len(history)
    assert all(decision.reasons for decision in decided)
    assert decided == decisions(history[::-1], rules, past)


@given(histories, all_rules)
def test_enough_verified_ones_stay_for_keep_last(history: list[Kept], rules: Rules) -> None:
    sound = sorted((k for k in history if k.verified is not False), key=lambda k: (k.segment, k.iteration))
    expected = sound if rules.keep_last < 0 else sound[-rules.keep_last :]
    going = {removal.id for removal in removable(history, rules)}
    assert not [kept for kept in expected if kept.id in going]
