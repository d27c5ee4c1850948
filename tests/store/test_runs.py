"""Runs move only along the map, whoever asks, and every move is an event."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import select, text, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from store.events import append_event
from store.ids import new_id
from store.models import Run, RunEvent, Segment
from store.runs import IllegalMove, LeaseLost, RunNotFound, transition
from store.states import MOVES, STATES


def _events(session: Session, run_id: str) -> list[RunEvent]:
    return list(session.scalars(select(RunEvent).where(RunEvent.run_id == run_id).order_by(RunEvent.seq)))


def test_new_run_is_queued_with_a_segment_and_an_event(session: Session, make_run: Callable[..., Run]) -> None:
    run = make_run()
    assert (run.state, run.event_seq, run.active_segment, run.version) == ("queued", 1, 1, 1)
    assert session.get_one(Segment, (run.id, 1)).spec == {"seed": 1}
    (event,) = _events(session, run.id)
    assert (event.type, event.actor, event.payload["to"]) == ("state", "ada", "queued")


def test_a_reason_may_quote_whatever_a_trainer_wrote(session: Session, make_run: Callable[..., Run]) -> None:
    hint: Any = {"no": "text"}
    run = transition(session, make_run().id, "stopped", reason_code="x\0", reason_detail="half \ud800", hint=hint)
    assert (run.reason_code, run.reason_detail, run.hint) == ("x\u2400", "half \ufffd", "{'no': 'text'}")


def test_transition_sets_the_reason_and_records_the_move(session: Session, make_run: Callable[..., Run]) -> None:
    run = transition(session, make_run().id, "stopped", actor="bob", reason_code="stopped", reason_detail="enough")
    assert (run.state, run.reason_code, run.reason_detail, run.version) == ("stopped", "stopped", "enough", 2)
    assert run.ended_at is not None
    assert _events(session, run.id)[-1].payload == {
        "from": "queued",
        "to": "stopped",
        "reason_code": "stopped",
        "reason_detail": "enough",
    }


def test_code_refuses_every_move_that_is_not_on_the_map(session: Session, make_run: Callable[..., Run]) -> None:
    run_id = make_run().id
    session.execute(text("ALTER TABLE runs DISABLE TRIGGER runs_move_allowed"))
    for source in STATES:
        for target in set(STATES) - MOVES[source]:
            session.execute(update(Run).where(Run.id == run_id).values(state=source))
            with pytest.raises(IllegalMove) as caught:
                transition(session, run_id, target)
            assert caught.value.allowed == sorted(MOVES[source])


def test_database_refuses_every_move_that_is_not_on_the_map(session: Session, make_run: Callable[..., Run]) -> None:
    run_id = make_run().id
    for source in STATES:
        for target in STATES:
            if source == target:
                continue
            session.execute(text("ALTER TABLE runs DISABLE TRIGGER runs_move_allowed"))
            session.execute(update(Run).where(Run.id == run_id).values(state=source))
            session.execute(text("ALTER TABLE runs ENABLE TRIGGER runs_move_allowed"))
            move = update(Run).where(Run.id == run_id).values(state=target)
            if target in MOVES[source]:
                session.execute(move)
            else:
                with (
                    pytest.raises(IntegrityError, match=f"cannot go from {source} to {target}"),
                    session.begin_nested(),
                ):
                    session.execute(move)


def test_stale_token_moves_nothing(session: Session, make_run: Callable[..., Run]) -> None:
    run = make_run()
    with pytest.raises(LeaseLost):
        transition(session, run.id, "starting", expect_token=1)
    assert run.state == "queued"


def test_unknown_run(session: Session) -> None:
    with pytest.raises(RunNotFound):
        transition(session, "r-none", "starting")
    with pytest.raises(RunNotFound):
        append_event(session, "r-none", "note", {}, segment=1)


def test_event_numbers_have_no_gap(session: Session, make_run: Callable[..., Run]) -> None:
    run_id = make_run().id
    for number in range(5):
        assert append_event(session, run_id, "note", {"message": str(number)}, segment=1) == number + 2
    assert [event.seq for event in _events(session, run_id)] == [1, 2, 3, 4, 5, 6]


def test_odd_text_of_a_payload_is_stored_by_the_rule(session: Session, make_run: Callable[..., Run]) -> None:
    run_id = make_run().id
    append_event(session, run_id, "note", {"message": "a\0b\ud800c", "value": float("nan")}, segment=1)
    assert _events(session, run_id)[-1].payload == {"message": "a\u2400b\ufffdc", "value": None}


def test_ids_have_a_prefix_and_80_random_bits() -> None:
    assert re.fullmatch(r"r-[a-z2-7]{16}", new_id("r"))
