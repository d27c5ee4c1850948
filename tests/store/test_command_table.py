"""Every command in every state: what it makes of the run and of itself, against a table written by hand (SPEC 8)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import select, text, update
from sqlalchemy.orm import Session

from store.commands import open_commands, request_command, request_requeue
from store.ids import new_id
from store.models import Checkpoint, Command, Run
from store.rollback import Wish, request_rollback
from store.runs import CommandRefused
from store.states import STATES

# state: what each of KINDS does. `state/status` of run and command right after asking; a dash is a refusal.
KINDS = ("checkpoint", "pause", "resume", "retry", "rollback", "stop", "kill")
TABLE = {
    "queued": ("-", "-", "-", "-", "queued/pending", "stopped/done", "cancelled/done"),
    "starting": ("-", "-", "-", "-", "starting/pending", "stopping/pending", "killing/pending"),
    "running": (
        *("running/pending", "pausing/pending", "-", "-", "running/pending", "stopping/pending", "killing/pending"),
    ),
    "pausing": ("-", "-", "-", "-", "pausing/pending", "stopping/pending", "killing/pending"),
    "paused": ("-", "-", "queued/done", "-", "paused/pending", "stopped/done", "cancelled/done"),
    # A stopping run without an open stop is being drained, or goes back: a stop has it stop for good.
    "stopping": ("-", "-", "-", "-", "stopping/pending", "stopping/pending", "killing/pending"),
    "killing": ("-", "-", "-", "-", "-", "-", "killing/pending"),
    "recovering": ("-", "-", "-", "-", "recovering/pending", "recovering/pending", "recovering/pending"),
    "stopped": ("-", "-", "queued/done", "-", "stopped/pending", "-", "-"),
    "cancelled": ("-", "-", "-", "queued/done", "cancelled/pending", "-", "-"),
    "failed": ("-", "-", "-", "queued/done", "failed/pending", "-", "-"),
    "succeeded": ("-", "-", "-", "-", "succeeded/pending", "-", "-"),
}

# What is open, and what is asked on top of it of a running run: the first one's status then, or a dash for a refusal.
SEVERITY = {
    "checkpoint": {"pause": "pending", "rollback": "pending", "stop": "pending", "kill": "superseded"},
    "pause": {"checkpoint": "-", "rollback": "superseded", "stop": "superseded", "kill": "superseded"},
    "rollback": {"checkpoint": "-", "pause": "-", "rollback": "-", "stop": "superseded", "kill": "superseded"},
    "stop": {"checkpoint": "-", "pause": "-", "rollback": "-", "kill": "superseded"},
    "kill": {"checkpoint": "-", "pause": "-", "rollback": "-", "stop": "-"},
}


def _in_state(session: Session, make_run: Callable[..., Run], state: str) -> Run:
    run = make_run()
    session.execute(text("ALTER TABLE runs DISABLE TRIGGER runs_move_allowed"))
    session.execute(update(Run).where(Run.id == run.id).values(state=state))
    session.execute(text("ALTER TABLE runs ENABLE TRIGGER runs_move_allowed"))
    session.refresh(run)
    return run


def _checkpoint(session: Session, run: Run) -> Checkpoint:
    known = session.scalar(select(Checkpoint).where(Checkpoint.run_id == run.id))
    if known is not None:
        return known
    row = Checkpoint(
        id=new_id("k"), run_id=run.id, segment=1, iteration=5, path="segment-0001/checkpoints/iter-000005", bytes=1,
        manifest_sha256="0" * 64, reason="schedule", status="good", lease_token=0,
    )  # fmt: skip
    session.add(row)
    session.flush()
    return row


def _ask(session: Session, run: Run, kind: str) -> Command:
    if kind in ("resume", "retry"):
        return request_requeue(session, run.id, kind, "ada")
    if kind == "rollback":
        wish = Wish(_checkpoint(session, run).id, {"seed": 1}, {})
        return request_rollback(
            session, run.id, wish, command_id=new_id("c"), requested_by="ada", version=None, deadline_s=60
        )
    return request_command(session, run.id, kind, "ada", 60)


def test_table_has_every_cell() -> None:
    assert set(TABLE) == set(STATES)
    assert {len(cells) for cells in TABLE.values()} == {len(KINDS)}


@pytest.mark.parametrize("state", STATES)
def test_every_command_in_this_state(session: Session, make_run: Callable[..., Run], state: str) -> None:
    for kind, wanted in zip(KINDS, TABLE[state], strict=True):
        run = _in_state(session, make_run, state)
        if wanted == "-":
            with pytest.raises(CommandRefused, match=run.name) as caught:
                _ask(session, run, kind)
            assert caught.value.allowed is not None
            assert (run.state, open_commands(session, run.id)) == (state, []), kind
            continue
        command = _ask(session, run, kind)
        session.refresh(run)
        assert f"{run.state}/{command.status}" == wanted, kind
        assert (command.finished_at is None) == (command.status == "pending")
        assert command.deadline_at is not None


@pytest.mark.parametrize("first", SEVERITY)
def test_severity_only_rises(session: Session, make_run: Callable[..., Run], first: str) -> None:
    for second, wanted in SEVERITY[first].items():
        run = _in_state(session, make_run, "running")
        opened = _ask(session, run, first)
        if wanted == "-":
            with pytest.raises(CommandRefused):
                _ask(session, run, second)
            assert [command.id for command in open_commands(session, run.id)] == [opened.id]
            continue
        _ask(session, run, second)
        session.refresh(opened)
        assert opened.status == wanted, second


@pytest.mark.parametrize(
    ("saved", "then"),
    [(True, "goes on from its newest checkpoint"), (False, "has no checkpoint and starts from the beginning")],
)
def test_what_is_queued_again_says_where_it_starts(
    session: Session, make_run: Callable[..., Run], saved: bool, then: str
) -> None:
    run = _in_state(session, make_run, "failed")
    if saved:
        _checkpoint(session, run)
    assert _ask(session, run, "retry").detail == f"it was failed and is queued; it {then}"
