"""Rows of checkpoints that lie whole on disk."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from store.ids import new_id
from store.models import Checkpoint, Run, Segment
from store.runs import locked_run


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


def starting_points(session: Session, run_id: str) -> dict[str, str]:
    """Checkpoints of this run that a segment, of this run or a fork, starts from: id to a sentence that says so."""
    own = select(Checkpoint.id).where(Checkpoint.run_id == run_id)
    rows = session.execute(
        select(Segment.start_checkpoint, Segment.run_id, Segment.number).where(Segment.start_checkpoint.in_(own))
    )
    return {
        checkpoint: f"segment {number} starts from it" if run == run_id else f"run {run} starts from it"
        for checkpoint, run, number in rows
        if checkpoint is not None
    }


def mark_removed(session: Session, run_id: str, checkpoint_id: str, token: int, why: str) -> bool:
    """Say that a checkpoint goes, before its files do; False if it must stay: it was pinned or the lease was lost."""
    run = session.get(Run, run_id, with_for_update=True, populate_existing=True)
    if run is None or run.lease_token != token:
        return False
    statement = (
        update(Checkpoint)
        .where(Checkpoint.id == checkpoint_id, Checkpoint.pinned.is_(False), Checkpoint.status != "removed")
        .values(status="removed", status_detail=why)
        .returning(Checkpoint.id)
        .execution_options(synchronize_session=False)
    )
    return session.scalar(statement) is not None
