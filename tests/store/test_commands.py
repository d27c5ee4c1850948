"""What asking does to a run, and which outcome a request gets."""

from collections.abc import Callable

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from store import commands
from store.commands import request_command
from store.models import Run, RunEvent
from store.runs import IllegalMove, transition


def _running(session: Session, run: Run) -> Run:
    transition(session, run.id, "starting")
    return transition(session, run.id, "running")


def test_stop_of_a_queued_run_is_done_at_once(session: Session, make_run: Callable[..., Run]) -> None:
    run = make_run()
    command = request_command(session, run.id, "stop", "ada", 60)
    assert (run.state, command.status, command.requested_by) == ("stopped", "done", "ada")
    assert command.finished_at is not None


def test_stop_of_a_running_run_waits_for_its_trainer(session: Session, make_run: Callable[..., Run]) -> None:
    run = _running(session, make_run())
    command = request_command(session, run.id, "stop", "ada", 60)
    assert (run.state, command.status) == ("stopping", "pending")
    assert (command.deadline_at - command.created_at).total_seconds() == 60
    assert commands.open_commands(session, run.id) == [command]


def test_second_stop_is_the_first_one(session: Session, make_run: Callable[..., Run]) -> None:
    run = _running(session, make_run())
    first = request_command(session, run.id, "stop", "ada", 60)
    assert request_command(session, run.id, "stop", "bob", 5).id == first.id


def test_ended_run_takes_no_command(session: Session, make_run: Callable[..., Run]) -> None:
    run = make_run()
    request_command(session, run.id, "stop", "ada", 60)
    with pytest.raises(IllegalMove) as caught:
        request_command(session, run.id, "stop", "ada", 60)
    assert caught.value.allowed == ["queued"]


@pytest.mark.parametrize(
    ("state", "reason", "words"),
    [
        ("stopped", "stopped", "a has already stopped at iteration 12."),
        ("stopped", "gate", "a has already stopped (gate) at iteration 12."),
        ("succeeded", "goal", "a has already succeeded at iteration 12."),
        ("failed", "fault", "a has already failed at iteration 12."),
        ("cancelled", "stop_deadline", "a has already been cancelled at iteration 12."),
        ("queued", None, "a is queued; it cannot be paused now."),
    ],
)
def test_refusal_says_how_the_run_stands(state: str, reason: str | None, words: str) -> None:
    run = Run(name="a", state=state, iteration=12, reason_code=reason)
    assert commands.refusal_sentence(run, "pause") == words


def test_stop_supersedes_pause_and_not_the_other_way_round(session: Session, make_run: Callable[..., Run]) -> None:
    run = _running(session, make_run())
    pause = request_command(session, run.id, "pause", "ada", 60)
    assert run.state == "pausing"
    request_command(session, run.id, "stop", "ada", 60)
    session.refresh(pause)
    assert (run.state, pause.status) == ("stopping", "superseded")
    with pytest.raises(IllegalMove):
        request_command(session, run.id, "pause", "ada", 60)


def test_checkpoint_leaves_the_state_alone(session: Session, make_run: Callable[..., Run]) -> None:
    run = _running(session, make_run())
    assert request_command(session, run.id, "checkpoint", "ada", 60).status == "pending"
    assert run.state == "running"


def test_way_of_a_command_is_told_by_events(session: Session, make_run: Callable[..., Run]) -> None:
    run = _running(session, make_run())
    command = request_command(session, run.id, "stop", "ada", 60)
    commands.mark_delivered(session, command.id)
    commands.mark_acked(session, command.id, "after this micro-batch")
    commands.mark_finished(session, command.id, "done")
    commands.mark_finished(session, command.id, "timed_out", "too late: the first outcome stays")
    told = session.scalars(select(RunEvent).where(RunEvent.run_id == run.id, RunEvent.type == "command"))
    assert [event.payload["status"] for event in told] == ["pending", "delivered", "acked", "done"]
    assert command.detail == "after this micro-batch"


def test_run_that_ended_otherwise_supersedes_what_was_open(session: Session, make_run: Callable[..., Run]) -> None:
    run = _running(session, make_run())
    checkpoint = request_command(session, run.id, "checkpoint", "ada", 60)
    stop = request_command(session, run.id, "stop", "ada", 60)
    commands.finish_open(session, run.id, {"stop": ("done", "stopped")})
    assert [checkpoint.status, stop.status] == ["superseded", "done"]


def test_command_of_an_unattended_run_times_out(session: Session, make_run: Callable[..., Run]) -> None:
    run = _running(session, make_run())
    command = request_command(session, run.id, "checkpoint", "ada", deadline_s=-1)
    assert commands.time_out_unattended(session) == 0  # its supervisor knows better
    transition(session, run.id, "failed")
    assert commands.time_out_unattended(session) == 1
    session.refresh(command)
    assert command.status == "timed_out"
