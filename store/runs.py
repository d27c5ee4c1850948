"""A run's row: made here, and moved from state to state by one function.

What is asked of a run is in `store.commands`, how it is taken from the queue in `store.queue`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, update
from sqlalchemy.orm import Session

from store.alerts import copy_open_alerts
from store.events import RunNotFound, append_event
from store.models import Checkpoint, Run, Segment, WorkerSlot
from store.states import LIVE, MOVES, TERMINAL
from store.storable import storable_text
from store.webhook_queue import announce

__all__ = [
    "CommandRefused",
    "ForkStart",
    "IllegalMove",
    "LeaseLost",
    "RunNotFound",
    "append_event",
    "change_run",
    "create_run",
    "locked_run",
    "transition",
]


class IllegalMove(Exception):
    """The run's state does not allow this; `allowed` lists the states it can go to."""

    def __init__(self, state: str, to: str, allowed: list[str]) -> None:
        super().__init__(f"a run that is {state} cannot become {to}; it can become {', '.join(allowed) or 'nothing'}")
        self.state = state
        self.to = to
        self.allowed = allowed


class CommandRefused(IllegalMove):
    """Something was asked of a run that does not fit how it stands; the message is a sentence for whoever asked."""

    def __init__(self, state: str, to: str, allowed: list[str], sentence: str) -> None:
        super().__init__(state, to, allowed)
        self.args = (sentence,)


@dataclass(frozen=True)
class ForkStart:
    """The checkpoint of another run that a new one starts from, and why."""

    checkpoint_id: str
    iteration: int
    reason: str | None = None


class LeaseLost(Exception):
    """Somebody else looks after the run now: what this caller knows about it no longer counts."""


def locked_run(session: Session, run_id: str, *, expect_token: int | None = None) -> Run:
    """The run's row as it is now, locked until the commit.

    Raises:
        RunNotFound
        LeaseLost: the run's lease token is not `expect_token`.
    """
    run = session.get(Run, run_id, with_for_update=True, populate_existing=True)
    if run is None:
        raise RunNotFound(run_id)
    if expect_token is not None and run.lease_token != expect_token:
        raise LeaseLost(f"run {run_id} is at lease {run.lease_token}, not {expect_token}")
    return run


def create_run(
    session: Session,
    *,
    run_id: str,
    name: str,
    spec: dict[str, Any],
    num_iterations: int,
    priority: int,
    gpus: int,
    created_by: str | None,
    fork: ForkStart | None = None,
) -> Run:
    """A queued run with its first segment."""
    run = Run(
        id=run_id,
        name=name,
        spec=spec,
        num_iterations=num_iterations,
        priority=priority,
        gpus=gpus,
        created_by=created_by,
        iteration=fork.iteration if fork else 0,
    )
    session.add(run)
    session.flush()
    segment = Segment(run_id=run_id, number=1, kind="start", spec=spec, created_by=created_by)
    if fork is not None:
        segment.kind, segment.reason = "fork", fork.reason
        segment.start_checkpoint, segment.start_iteration = fork.checkpoint_id, fork.iteration
    session.add(segment)
    session.flush()
    if fork is not None:
        copy_open_alerts(session, session.get_one(Checkpoint, fork.checkpoint_id), run_id)
    payload = {"from": None, "to": "queued", "reason_code": None, "reason_detail": None}
    append_event(session, run_id, "state", payload, segment=1, actor=created_by)
    _announce_state(session, run, payload)
    session.refresh(run)
    return run


def _storable(words: object) -> str | None:
    return None if words is None else storable_text(str(words))


def _announce_state(session: Session, run: Run, payload: Mapping[str, Any]) -> None:
    told = {**payload, "iteration": run.iteration, "num_iterations": run.num_iterations}
    announce(session, "run.state", {"run": {"id": run.id, "name": run.name}, **told})


def change_run(session: Session, run: Run, actor: str | None, **values: Any) -> None:
    """Set `name`, `notes` or `priority` of a locked run, and say so in its history."""
    before = {name: getattr(run, name) for name in values}
    statement = update(Run).where(Run.id == run.id).values(version=Run.version + 1, updated_at=func.now(), **values)
    session.execute(statement.execution_options(synchronize_session=False))
    words = {
        "name": f"renamed from {before.get('name')} to {values.get('name')}",
        "notes": "notes changed",
        "priority": f"priority changed from {before.get('priority')} to {values.get('priority')}",
    }
    message = "; ".join(words[name] for name in sorted(values))
    append_event(
        session, run.id, "note", {"level": "info", "message": message}, segment=run.active_segment, actor=actor
    )
    session.refresh(run)


def transition(
    session: Session,
    run_id: str,
    to: str,
    *,
    expect_token: int | None = None,
    actor: str | None = None,
    reason_code: str | None = None,
    reason_detail: str | None = None,
    hint: str | None = None,
    **columns: Any,
) -> Run:
    """Move a run to state `to`: the only way a state changes. The row, its event and the announcement go together.

    `columns` are set in the same statement. Leaving a live state ends the lease and frees the slots, which is right
    only once the processes are gone: while they may still be there a run is `recovering` and keeps both.

    Raises:
        RunNotFound
        LeaseLost: the run's lease token is not `expect_token`.
        IllegalMove: `store.states.MOVES` does not have the move.
    """
    run = locked_run(session, run_id, expect_token=expect_token)
    # They may quote what a trainer wrote, and a move must not fail of that.
    reason_code, reason_detail, hint = (_storable(words) for words in (reason_code, reason_detail, hint))
    source = run.state
    if to not in MOVES[source]:
        raise IllegalMove(source, to, sorted(MOVES[source]))
    values: dict[str, Any] = {
        "state": to,
        "reason_code": reason_code,
        "reason_detail": reason_detail,
        "hint": hint,
        "version": Run.version + 1,
        "updated_at": func.now(),
    }
    if to == "running":
        values["started_at"] = func.coalesce(Run.started_at, func.now())
    if to in TERMINAL:
        values["ended_at"] = func.now()
    elif source in TERMINAL:
        # A user brought it back: it queues anew, with a whole budget.
        values |= {"ended_at": None, "queued_at": func.now(), "not_before": None, "infrastructure_failures": 0}
    if to not in LIVE:
        values |= {"phase": None, "progress_deadline_at": None, "lease_expires_at": None}
        if to != "recovering":
            values |= {"lease_worker": None, "supervisor_pid": None}
            session.execute(update(WorkerSlot).where(WorkerSlot.run_id == run_id).values(run_id=None))
    session.execute(update(Run).where(Run.id == run_id, Run.state == source).values({**values, **columns}))
    payload = {"from": source, "to": to, "reason_code": reason_code, "reason_detail": reason_detail}
    append_event(session, run_id, "state", payload, segment=run.active_segment, iteration=run.iteration, actor=actor)
    session.refresh(run)
    _announce_state(session, run, payload)
    return run
