"""Going back: what is asked, and the one transaction that does it.

A roll back is an open command until its checkpoint was compared with its manifest and no process of the run is left.
Then one transaction opens the new segment, moves what people follow to it, and queues the run. Nothing of an older
segment is touched. Who does it is who looks after the run at that moment: its supervisor while it has a trainer, the
reconciler while it is at rest, queued or lost.

    pending: the checkpoint is being compared     delivered: it is whole     acked: the trainer is coming to rest
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select, text, update
from sqlalchemy.orm import Session

from store.alerts import settle_alerts
from store.checkpoints import record_verification
from store.commands import add_command, mark_delivered, mark_finished, open_commands, refuse, supersede
from store.events import append_event
from store.metrics_read import line_to
from store.models import Checkpoint, Command, Run, Segment
from store.runs import locked_run, transition
from store.states import AT_REST

# States in which nobody holds a lease, so that the reconciler carries a roll back out.
UNHELD = AT_REST | {"queued"}


class StaleVersion(Exception):
    """The run changed since the caller looked at it."""

    def __init__(self, version: int) -> None:
        super().__init__(f"the run is at version {version} now")
        self.version = version


class TargetUnusable(Exception):
    """The checkpoint cannot be gone back to; the message says why. `code` is a stable word."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Wish:
    """A roll back as asked: where to, the whole spec from there on, what was set, and why."""

    checkpoint_id: str
    spec: dict[str, Any]
    settings: dict[str, Any]
    reason: str | None = None


@dataclass(frozen=True)
class OpenRollback:
    """A roll back without an outcome yet, and the checkpoint that it goes to."""

    command: Command
    target: Checkpoint | None

    @property
    def verified(self) -> bool:
        """Whether the checkpoint was compared with its manifest and is whole."""
        return self.command.status in ("delivered", "acked")


def request_rollback(
    session: Session, run_id: str, wish: Wish, *, command_id: str, requested_by: str | None, version: int | None,
    deadline_s: float,
) -> Command:  # fmt: skip
    """Ask a run to go back, whatever it is doing. An open pause gives way; a stop does not.

    Raises:
        RunNotFound
        StaleVersion: `version` is no longer the run's.
        CommandRefused: it is being stopped or killed, or another roll back is under way.
        TargetUnusable: the checkpoint is not whole any more.
    """
    run = locked_run(session, run_id)
    if version is not None and run.version != version:
        raise StaleVersion(run.version)
    open_now = open_commands(session, run_id)
    if any(command.kind in ("stop", "kill", "rollback") for command in open_now) or run.state == "killing":
        raise refuse(run, "rollback", open_now)
    target = session.get(Checkpoint, wish.checkpoint_id, with_for_update=True, populate_existing=True)
    usable(target, wish.checkpoint_id)
    supersede(session, open_now, "rollback")
    # Who looked at the run before this was asked must look again before asking for another.
    session.execute(update(Run).where(Run.id == run_id).values(version=Run.version + 1))
    session.refresh(run)
    payload = {
        "checkpoint": wish.checkpoint_id,
        "set": wish.settings,
        "spec": wish.spec,
        "reason": wish.reason,
    }
    return add_command(session, run_id, "rollback", requested_by, deadline_s, payload, command_id)


def usable(target: Checkpoint | None, checkpoint_id: str) -> Checkpoint:
    """The checkpoint, if its row says that it is there and good.

    Raises:
        TargetUnusable
    """
    if target is None:
        raise TargetUnusable("checkpoint_removed", f"There is no checkpoint {checkpoint_id} any longer.")
    if target.status != "good":
        why = f": {target.status_detail}" if target.status_detail else ""
        raise TargetUnusable(
            f"checkpoint_{target.status}", f"Checkpoint {target.id} is {target.status}{why}; choose another one."
        )
    return target


def open_rollback(session: Session, run_id: str) -> OpenRollback | None:
    """The roll back that waits for the run to come to rest, if one was asked."""
    for command in open_commands(session, run_id):
        if command.kind == "rollback":
            target = session.get(Checkpoint, command.payload["checkpoint"], populate_existing=True)
            return OpenRollback(command, target)
    return None


def resting_rollbacks(session: Session) -> list[tuple[str, str]]:
    """(run, command) of each open roll back of a run that nobody holds."""
    statement = (
        select(Command.run_id, Command.id)
        .join(Run, Run.id == Command.run_id)
        .where(Command.kind == "rollback", Command.finished_at.is_(None), Run.state.in_(UNHELD))
    )
    return [(run_id, command_id) for run_id, command_id in session.execute(statement.order_by(Command.created_at))]


def fail_rollback(session: Session, asked: OpenRollback, sentence: str, *, damaged: bool) -> None:
    """The checkpoint cannot be gone back to; the run goes on, or rests, as if nothing had been asked."""
    if damaged and asked.target is not None:
        record_verification(session, asked.target.run_id, asked.target.id, sentence)
    mark_finished(session, asked.command.id, "failed", f"{sentence}; nothing of the run was changed")


def go_back(session: Session, run_id: str, asked: OpenRollback, note: str | None = None) -> Run | None:
    """Open the segment, make it the active one, and queue the run; None when the checkpoint went meanwhile.

    The caller's transaction is the whole of it. The caller holds the run's lease or has found the run unheld, has
    proved that no process of it is left, and has brought it to a state from which it can be queued.

    Args:
        note: what else there is to tell, added to the command's detail.
    """
    run = locked_run(session, run_id)
    command = asked.command
    if asked.target is not None:
        session.refresh(asked.target, with_for_update=True)
    try:
        target = usable(asked.target, command.payload["checkpoint"])
    except TargetUnusable as error:
        fail_rollback(session, asked, str(error), damaged=False)
        return None
    number = 1 + (session.scalar(select(func.max(Segment.number)).where(Segment.run_id == run_id)) or 0)
    left, waits = run.active_segment, run.state == "queued"
    _open_segment(session, command, target, number)
    _move_to_segment(session, run, command.payload["spec"], target.iteration, number)
    rewrite_latest(session, run_id, number)
    settle_alerts(session, run_id)
    _tell_segment(session, command, target, number, left)
    where = f"iteration {target.iteration} of segment {target.segment}"
    if not waits:
        detail = f"segment {number} goes on from {where}"
        run = transition(
            session, run_id, "queued", actor=command.requested_by, reason_code="rollback", reason_detail=detail,
            queued_at=func.now(),
        )  # fmt: skip
    session.execute(
        update(Command)
        .where(Command.id == command.id)
        .values(payload={**command.payload, "outcome": {"segment": number, "iteration": target.iteration}})
        .execution_options(synchronize_session=False)
    )
    session.refresh(command)
    mark_finished(session, command.id, "done", f"segment {number} starts from {where}" + (f"; {note}" if note else ""))
    return run


def _open_segment(session: Session, command: Command, target: Checkpoint, number: int) -> None:
    session.add(
        Segment(
            run_id=command.run_id,
            number=number,
            kind="rollback",
            spec=command.payload["spec"],
            start_iteration=target.iteration,
            start_checkpoint=target.id,
            created_by=command.requested_by,
            reason=command.payload.get("reason"),
        )
    )
    session.flush()


def _move_to_segment(session: Session, run: Run, spec: dict[str, Any], iteration: int, number: int) -> None:
    """Give the run's row what people follow of the new segment, and a whole budget for losses."""
    resources = spec.get("resources") or {}
    session.execute(
        update(Run)
        .where(Run.id == run.id)
        .values(
            spec=spec,
            num_iterations=spec.get("iterations", run.num_iterations),
            priority=resources.get("priority", run.priority),
            gpus=resources.get("gpus", run.gpus),
            active_segment=number,
            iteration=iteration,
            not_before=None,
            infrastructure_failures=0,
            version=Run.version + 1,
            updated_at=func.now(),
        )
    )
    session.refresh(run)


def _tell_segment(session: Session, command: Command, target: Checkpoint, number: int, left: int) -> None:
    """Write into the run's history that a segment began, and why; `left` is the one that it was in."""
    payload = {
        "number": number,
        "kind": "rollback",
        "start_iteration": target.iteration,
        "start_checkpoint": target.id,
        "from_segment": target.segment,
        "left_segment": left,
        "set": command.payload.get("set", {}),
        "reason": command.payload.get("reason"),
        "command": command.id,
    }
    append_event(
        session,
        command.run_id,
        "segment",
        payload,
        segment=number,
        iteration=target.iteration,
        actor=command.requested_by,
    )


def confirm_target(session: Session, asked: OpenRollback) -> None:
    """The checkpoint was compared and is whole."""
    if asked.command.status == "pending":
        mark_delivered(session, asked.command.id)
        session.refresh(asked.command)


def rewrite_latest(session: Session, run_id: str, segment: int) -> None:
    """Make the newest values those of the line to `segment`, which has no iterations of its own yet."""
    session.execute(text("DELETE FROM latest_metrics WHERE run_id = :run"), {"run": run_id})
    for piece in reversed(line_to(session, run_id, segment)):
        session.execute(
            text("""
                INSERT INTO latest_metrics (run_id, metric_id, segment, iteration, value)
                SELECT :run, d.id, :segment, newest.iteration, newest.value
                FROM metric_defs d CROSS JOIN LATERAL (
                    SELECT iteration, value FROM metric_points
                    WHERE run_id = :run AND metric_id = d.id AND segment = :segment
                      AND iteration BETWEEN :first AND :last
                    ORDER BY iteration DESC LIMIT 1
                ) AS newest
                ON CONFLICT (run_id, metric_id) DO NOTHING
            """),
            {"run": run_id, "segment": piece.segment, "first": piece.first, "last": piece.last},
        )
