"""Before a trainer starts: which segment it runs, and what the last attempt left undelivered."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import select, update
from sqlalchemy.orm import Session, sessionmaker

from ppo_core import rundir
from ppo_core.errors import RunDirectoryError
from ppo_core.rundir import SegmentDir, SegmentStart
from store.alerts import settle_alerts
from store.checkpoints import find_checkpoint, present_checkpoints
from store.events import append_event
from store.journal import journal_position
from store.metrics_read import line_to
from store.models import Checkpoint, Run, Segment
from store.rollback import rewrite_latest
from store.runs import LeaseLost, locked_run
from worker.agreement import adopt_checkpoints
from worker.delivery import Delivery

AWAY_HINT = "Nothing of the run was changed. Mount the disk or put the folder back, then retry the run."


@dataclass(frozen=True)
class Prepared:
    """All that the supervisor needs to start the trainer."""

    attempt: int
    start: SegmentStart
    folder: SegmentDir


class KilledBeforeStart(Exception):
    """The run was killed between its claim and the start of its trainer."""


def prepare(sessions: sessionmaker[Session], run_id: str, token: int, run_dir: Path, supervisor_pid: int) -> Prepared:
    """Settle what earlier attempts left, choose the segment, and make its folder.

    A start behind the last journalled iteration opens a new segment, of kind recovery: no iteration ever has two
    values in one segment. So does one while the trainer of a lost attempt still writes, on a machine that is cut off.
    The database learns of the segment first, so a crash in between only leaves a row whose folder the next attempt
    makes.

    Raises:
        LeaseLost: the claim no longer counts.
        KilledBeforeStart: there is no trainer to start.
        RunDirectoryError: the run's folder is not what it should be, or what the run left in it is not there.
    """
    with sessions.begin() as session:
        run = locked_run(session, run_id, expect_token=token)
        if run.state == "killing":
            raise KilledBeforeStart
        if run.state not in ("starting", "stopping"):
            raise LeaseLost(f"run {run_id} is {run.state}, not starting")
        session.execute(update(Run).where(Run.id == run_id).values(supervisor_pid=supervisor_pid))
        attempt, number = run.attempt, run.active_segment
        _, stored = journal_position(session, run_id, number)
    present = rundir.segments(run_dir)
    active = rundir.segment_dir(run_dir, number)
    _see_journal(active, stored)
    if active in present:
        Delivery(sessions, run_id, number, active).all(token)
    with sessions.begin() as session:
        locked_run(session, run_id, expect_token=token)
        if active in present:
            adopt_checkpoints(session, run_id, number, active, token)
            start = _without_company(active, rundir.next_start(run_dir, _damaged(session, run_id, run_dir)))
        else:
            start = _first_start(session, run_id, number, run_dir)
        start = _on_whole_ground(session, run_id, number, start, run_dir)
        if start.segment != number:
            _open_recovery(session, run_id, number, start, run_dir)
    if start.checkpoint is not None and not rundir.checkpoints(rundir.segment_dir(run_dir, start.segment)):
        _see_segment(SegmentDir(Path(start.checkpoint).parent.parent))
    return Prepared(attempt, start, rundir.create_segment(run_dir, start))


def _see_journal(segment: SegmentDir, stored: int) -> None:
    """That a segment which has trained lies here with its journal: without it a trainer would begin from nothing.

    Raises:
        RunDirectoryError
    """
    if stored == 0:
        return
    _see_segment(segment)
    found = segment.journal.stat().st_size if segment.journal.is_file() else 0
    if found < stored:
        raise RunDirectoryError(
            f"{segment.journal} has {found} bytes, {stored} of it were stored: {segment.path} is not the folder that "
            "the run trained in",
            hint=AWAY_HINT,
        )


def _see_segment(segment: SegmentDir) -> None:
    if not segment.path.is_dir():
        raise RunDirectoryError(f"{segment.path} is not there: is the right disk mounted?", hint=AWAY_HINT)


def loaded_checkpoint(sessions: sessionmaker[Session], prepared: Prepared, run_dir: Path) -> Checkpoint | None:
    """The row of the checkpoint that the attempt's trainer loads first: its segment's newest, else the start's."""
    own = rundir.checkpoints(prepared.folder)
    path = str(own[-1]) if own else prepared.start.checkpoint
    with sessions() as session:
        return None if path is None else _row_of(session, path, run_dir)


def _without_company(active: SegmentDir, start: SegmentStart) -> SegmentStart:
    """The same start, unless somebody still writes the journal that it would go on with: then in a new segment."""
    if rundir.segment_dir(active.path.parent, start.segment) != active or not rundir.has_writer(active.journal):
        return start
    own = rundir.checkpoints(active)
    return SegmentStart(start.run_id, start.segment + 1, start.spec, str(own[-1]) if own else start.checkpoint)


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


def _damaged(session: Session, run_id: str, run_dir: Path) -> frozenset[Path]:
    rows = session.scalars(select(Checkpoint.path).where(Checkpoint.run_id == run_id, Checkpoint.status == "damaged"))
    return frozenset(run_dir / path for path in rows)


def _on_whole_ground(session: Session, run_id: str, number: int, start: SegmentStart, run_dir: Path) -> SegmentStart:
    """The same start, unless the checkpoint that it begins with is known to be no good.

    Then it goes further back, in a new segment: to the newest good checkpoint before that one on the run's own line,
    else to where the run itself began.

    Raises:
        RunDirectoryError: the run began from that very checkpoint.
    """
    own = rundir.checkpoints(rundir.segment_dir(run_dir, start.segment))
    if start.checkpoint is None or own:  # A trainer goes on from what its own segment holds.
        return start
    row = _row_of(session, start.checkpoint, run_dir)
    if row is None or row.status == "good":
        return start
    line = line_to(session, run_id, number)
    older = [
        checkpoint
        for checkpoint in present_checkpoints(session, run_id)
        if checkpoint.status == "good"
        and checkpoint.iteration < row.iteration
        and any(piece.segment == checkpoint.segment and checkpoint.iteration <= piece.last for piece in line)
    ]
    best = max(older, key=lambda checkpoint: (checkpoint.iteration, checkpoint.segment), default=None)
    origin = session.get_one(Segment, (run_id, line[0].segment)).start_checkpoint
    if best is None and origin is not None:
        best = session.get(Checkpoint, origin)
        if best is None or best.status != "good":
            raise RunDirectoryError(
                f"checkpoint {row.id}, which this run was forked from, is {row.status}: {row.status_detail}; fork "
                "again from another one"
            )
    path = None if best is None else str(run_dir.parent / best.run_id / best.path)
    return SegmentStart(run_id, number + 1, start.spec, path)


def _row_of(session: Session, path: str, run_dir: Path) -> Checkpoint | None:
    """The row of a checkpoint by the path that a segment's start holds: RUNS/run/segment-0001/checkpoints/..."""
    try:
        run, _, rest = Path(path).relative_to(run_dir.parent).as_posix().partition("/")
    except ValueError:
        return None
    return find_checkpoint(session, run, rest)


def _open_recovery(session: Session, run_id: str, old: int, start: SegmentStart, run_dir: Path) -> None:
    """A segment row for a restart that goes back to a checkpoint, or to the old segment's own beginning."""
    before = session.get_one(Segment, (run_id, old))
    found = None if start.checkpoint is None else _row_of(session, start.checkpoint, run_dir)
    iteration = rundir.start_iteration(start)
    passed_over = [
        checkpoint
        for checkpoint in present_checkpoints(session, run_id)
        if checkpoint.status == "damaged" and checkpoint.segment == old and checkpoint.iteration > iteration
    ]
    why = f"the last attempt was lost; segment {start.segment} goes on from iteration {iteration}"
    if passed_over:
        newest = passed_over[-1]
        why = (
            f"checkpoint {newest.id} of iteration {newest.iteration} is damaged ({newest.status_detail}); segment "
            f"{start.segment} goes on from {f'the good one of iteration {iteration}' if found else 'the beginning'}"
        )
    session.add(
        Segment(
            run_id=run_id,
            number=start.segment,
            kind="recovery",
            spec=before.spec,
            start_iteration=iteration,
            start_checkpoint=None if found is None else found.id,
            reason=why,
        )
    )
    session.flush()
    session.execute(
        update(Run)
        .where(Run.id == run_id)
        .values(active_segment=start.segment, iteration=iteration, version=Run.version + 1)
    )
    rewrite_latest(session, run_id, start.segment)
    settle_alerts(session, run_id)
    payload = {"level": "info", "message": why}
    append_event(session, run_id, "note", payload, segment=start.segment, iteration=iteration)
