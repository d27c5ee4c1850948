"""Before a trainer starts: which segment it runs, and what the last attempt left undelivered."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import update
from sqlalchemy.orm import Session, sessionmaker

from ppo_core import rundir
from ppo_core.errors import RunDirectoryError
from ppo_core.rundir import SegmentDir, SegmentStart
from store.checkpoints import find_checkpoint
from store.events import append_event
from store.models import Checkpoint, Run, Segment
from store.runs import LeaseLost, locked_run
from worker.agreement import adopt_checkpoints
from worker.delivery import Delivery


@dataclass(frozen=True)
class Prepared:
    """All that the supervisor needs to start the trainer."""

    attempt: int
    start: SegmentStart
    folder: SegmentDir


def prepare(sessions: sessionmaker[Session], run_id: str, token: int, run_dir: Path, supervisor_pid: int) -> Prepared:
    """Settle what earlier attempts left, choose the segment, and make its folder.

    A start behind the last journalled iteration opens a new segment, of kind recovery: no iteration ever has two
    values in one segment. The database learns of the segment first, so a crash in between only leaves a row whose
    folder the next attempt makes.

    Raises:
        LeaseLost: the claim no longer counts.
        RunDirectoryError: the run's folder is not what it should be.
    """
    with sessions.begin() as session:
        run = locked_run(session, run_id, expect_token=token)
        if run.state not in ("starting", "stopping"):
            raise LeaseLost(f"run {run_id} is {run.state}, not starting")
        session.execute(update(Run).where(Run.id == run_id).values(supervisor_pid=supervisor_pid))
        attempt, number = run.attempt, run.active_segment
    present = rundir.segments(run_dir)
    active = rundir.segment_dir(run_dir, number)
    if active in present:
        Delivery(sessions, run_id, number, active).all(token)
        start = rundir.next_start(run_dir)
        with sessions.begin() as session:
            locked_run(session, run_id, expect_token=token)
            adopt_checkpoints(session, run_id, number, active, token)
            if start.segment != number:
                _open_recovery(session, run_id, number, start, run_dir)
    else:
        with sessions.begin() as session:
            start = _first_start(session, run_id, number, run_dir)
    return Prepared(attempt, start, rundir.create_segment(run_dir, start))


def _first_start(session: Session, run_id: str, number: int, run_dir: Path) -> SegmentStart:
    row = session.get_one(Segment, (run_id, number))
    checkpoint = None
    if row.start_checkpoint is not None:
        found = session.get(Checkpoint, row.start_checkpoint)
        if found is None:
            raise RunDirectoryError(
                f"segment {number} starts from checkpoint {row.start_checkpoint}, which is not known"
            )
        checkpoint = str(run_dir.parent / found.run_id / found.path)
    return SegmentStart(run_id, number, row.spec, checkpoint)


def _open_recovery(session: Session, run_id: str, old: int, start: SegmentStart, run_dir: Path) -> None:
    """A segment row for a restart that goes back to a checkpoint, or to the old segment's own beginning."""
    before = session.get_one(Segment, (run_id, old))
    checkpoint_id = before.start_checkpoint
    if start.checkpoint is not None and Path(start.checkpoint).is_relative_to(run_dir):
        found = find_checkpoint(session, run_id, Path(start.checkpoint).relative_to(run_dir).as_posix())
        checkpoint_id = found.id if found is not None else checkpoint_id
    iteration = rundir.start_iteration(start)
    why = f"the last attempt was lost; segment {start.segment} goes on from iteration {iteration}"
    session.add(
        Segment(
            run_id=run_id,
            number=start.segment,
            kind="recovery",
            spec=before.spec,
            start_iteration=iteration,
            start_checkpoint=checkpoint_id,
            reason=why,
        )
    )
    session.flush()
    session.execute(
        update(Run)
        .where(Run.id == run_id)
        .values(active_segment=start.segment, iteration=iteration, version=Run.version + 1)
    )
    payload = {"level": "info", "message": why}
    append_event(session, run_id, "note", payload, segment=start.segment, iteration=iteration)
