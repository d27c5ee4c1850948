"""Rows of checkpoints that lie whole on disk."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from store.events import append_event
from store.ids import new_id
from store.models import Checkpoint, Command, Run, Segment
from store.runs import locked_run

MOST_NAMED = 5  # of those that start from one checkpoint; a sentence has to stay one
# Comparing a checkpoint with its manifest reads all of it; slow disks read 50 MB in a second.
LEAST_COMPARISON_S = 120.0
SLOW_DISK_BYTES_PER_S = 50e6


def longest_comparison_s(num_bytes: int) -> float:
    """How long comparing a checkpoint of `num_bytes` with its manifest may take."""
    return LEAST_COMPARISON_S + num_bytes / SLOW_DISK_BYTES_PER_S


@dataclass(frozen=True)
class NewCheckpoint:
    """What the journal or the disk says about a checkpoint; `path` is relative to the run's folder."""

    segment: int
    iteration: int
    path: str
    bytes: int
    manifest_sha256: str
    reason: str
    judge_score: float | None = None


def record_checkpoint(session: Session, run_id: str, new: NewCheckpoint, token: int) -> Checkpoint | None:
    """Insert a checkpoint's row; None if there is one already.

    Raises:
        LeaseLost: `token` is no longer the run's; the row's lock keeps it so until the commit.
    """
    locked_run(session, run_id, expect_token=token)
    statement = (
        insert(Checkpoint)
        .values(id=new_id("k"), run_id=run_id, lease_token=token, **asdict(new))
        .on_conflict_do_nothing(index_elements=["run_id", "segment", "iteration"])
        .returning(Checkpoint)
    )
    return session.scalar(statement)


def checkpoint_fields(checkpoint: Checkpoint) -> dict[str, Any]:
    """A checkpoint as events carry it."""
    columns = ("id", "segment", "iteration", "path", "bytes", "manifest_sha256", "reason", "status", "judge_score")
    return {name: getattr(checkpoint, name) for name in columns}


def find_checkpoint(session: Session, run_id: str, path: str) -> Checkpoint | None:
    """The checkpoint at `path`, relative to the run's folder."""
    return session.scalar(select(Checkpoint).where(Checkpoint.run_id == run_id, Checkpoint.path == path))


def present_checkpoints(session: Session, run_id: str) -> list[Checkpoint]:
    """The run's checkpoints that nobody removed, oldest first."""
    statement = select(Checkpoint).where(Checkpoint.run_id == run_id, Checkpoint.status != "removed")
    return list(session.scalars(statement.order_by(Checkpoint.segment, Checkpoint.iteration)))


def starts_from_checkpoint(session: Session, run: Run) -> bool:
    """Whether the run's next start goes on from a checkpoint: its active segment holds one, or began from one."""
    number = run.active_segment
    began_from = session.scalar(
        select(Segment.start_checkpoint).where(Segment.run_id == run.id, Segment.number == number)
    )
    own = select(Checkpoint.id).where(
        Checkpoint.run_id == run.id, Checkpoint.segment == number, Checkpoint.status == "good"
    )
    return began_from is not None or session.scalar(own.limit(1)) is not None


def starting_points(session: Session, run_id: str) -> dict[str, str]:
    """Checkpoints that segments or forks started from, or an open roll back will: id to a sentence that names them."""
    own = select(Checkpoint.id).where(Checkpoint.run_id == run_id)
    segments: dict[str, list[str]] = {}
    forks: dict[str, list[str]] = {}
    rows = session.execute(
        select(Segment.start_checkpoint, Segment.run_id, Segment.number)
        .where(Segment.start_checkpoint.in_(own))
        .order_by(Segment.created_at, Segment.number)
    )
    for checkpoint, run, number in rows:
        if checkpoint is not None:
            names, name = (segments, str(number)) if run == run_id else (forks, run)
            names.setdefault(checkpoint, []).append(name)
    asked = session.execute(
        select(Command.payload["checkpoint"].astext, Command.id).where(
            Command.run_id == run_id, Command.kind == "rollback", Command.finished_at.is_(None)
        )
    )
    backs = {checkpoint: [command] for checkpoint, command in asked if checkpoint}
    return {
        checkpoint: "; ".join(
            _start_from_it(what, names[checkpoint])
            for what, names in (("segment", segments), ("run", forks), ("roll back", backs))
            if checkpoint in names
        )
        for checkpoint in (segments | forks | backs)
    }


def _start_from_it(what: str, names: list[str]) -> str:
    if len(names) == 1:
        return f"{what} {names[0]} starts from it"
    told = names[:MOST_NAMED]
    others = len(names) - len(told)
    last = f"{others} more" if others else told.pop()
    return f"{what}s {', '.join(told)} and {last} start from it"


def read_checkpoint(session: Session, run_id: str, checkpoint_id: str) -> Checkpoint | None:
    """One checkpoint of a run."""
    return session.scalar(select(Checkpoint).where(Checkpoint.run_id == run_id, Checkpoint.id == checkpoint_id))


def locked_checkpoint(session: Session, run_id: str, checkpoint_id: str) -> Checkpoint | None:
    """One checkpoint as it is now, its run and it locked until the commit: nobody removes it meanwhile.

    Raises:
        RunNotFound
    """
    locked_run(session, run_id)
    statement = select(Checkpoint).where(Checkpoint.run_id == run_id, Checkpoint.id == checkpoint_id)
    return session.scalar(statement.with_for_update().execution_options(populate_existing=True))


def change_checkpoint(session: Session, row: Checkpoint, change: str, actor: str | None = None, **values: Any) -> None:
    """Set columns of a locked checkpoint and say so in the run's history; `change` is the word for it."""
    for name, value in values.items():
        setattr(row, name, value)
    session.flush()
    payload = {
        **checkpoint_fields(row),
        "change": change,
        "status_detail": row.status_detail,
        "pinned": row.pinned,
        "label": row.label,
    }
    append_event(session, row.run_id, "checkpoint", payload, segment=row.segment, iteration=row.iteration, actor=actor)


def record_verification(
    session: Session, run_id: str, checkpoint_id: str, fault: str | None, actor: str | None = None
) -> Checkpoint | None:
    """Store what comparing a checkpoint's files gave; `fault` says what is wrong. None if there is none any longer.

    Whoever finds a checkpoint damaged may say so, with or without the lease: it is a fact about files.
    """
    row = locked_checkpoint(session, run_id, checkpoint_id)
    if row is None or row.status == "removed":
        return None
    if fault is not None:
        change_checkpoint(session, row, "damaged", actor, status="damaged", status_detail=fault)
    elif row.status == "damaged" or actor is not None:
        change_checkpoint(
            session, row, "verified", actor, status="good", status_detail=None, verified_at=datetime.now(UTC)
        )
    else:  # A matter of course: the row says it, the history need not.
        row.verified_at = datetime.now(UTC)
        session.flush()
    return row
