"""Rows of checkpoints and their files say the same, also after a crash between the one and the other.

A checkpoint comes as files first, then as a row; it goes as a row first, then as files. So a death in between leaves
files without a row, which are adopted, or a removed row with files, whose removal is finished. Files that are gone
though nobody removed them are told by their row.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from pathlib import Path

from sqlalchemy import select, update
from sqlalchemy.orm import Session, sessionmaker

from ppo_core import rundir
from ppo_core.errors import CheckpointError
from ppo_core.rundir import SegmentDir, remove_checkpoint, stored_checkpoint
from store.checkpoints import (
    NewCheckpoint,
    change_checkpoint,
    checkpoint_fields,
    locked_checkpoint,
    present_checkpoints,
    record_checkpoint,
)
from store.events import append_event
from store.models import Checkpoint, Segment
from store.runs import locked_run
from store.states import LIVE

log = logging.getLogger(__name__)

MISSING = "its files are gone, and it was not PPO Control that removed them"
ALL_MISSING = "its files are not there, and none of the run's other checkpoints is: is the right disk mounted?"


def agree(sessions: sessionmaker[Session], run_id: str, run_dir: Path) -> None:
    """Make rows and files of a run at rest agree; a run that is not at rest has others who do it."""
    finish_removals(sessions, run_id, run_dir)
    note_missing(sessions, run_id, run_dir)
    leftovers: list[Path] = []
    with sessions.begin() as session:
        # Nobody can claim the run while its row is locked, so what a trainer left half-written is nobody's.
        run = locked_run(session, run_id)
        if run.state in LIVE or run.state == "recovering":
            return
        numbers = select(Segment.number).where(Segment.run_id == run_id).order_by(Segment.number)
        for number in session.scalars(numbers).all():
            segment = rundir.segment_dir(run_dir, number)
            adopt_checkpoints(session, run_id, number, segment, run.lease_token)
            leftovers += rundir.set_leftovers_aside(segment)
    for path in leftovers:  # which may take long, so nobody waits for it
        shutil.rmtree(path, ignore_errors=True)


def adopt_checkpoints(session: Session, run_id: str, number: int, folder: SegmentDir, token: int) -> None:
    """Record checkpoints that were renamed into place by a trainer that died before it could say so."""
    known = set(
        session.scalars(select(Checkpoint.iteration).where(Checkpoint.run_id == run_id, Checkpoint.segment == number))
    )
    for path in rundir.checkpoints(folder):
        iteration = rundir.checkpoint_iteration(path)
        if iteration is None or iteration in known:
            continue
        try:
            size = rundir.checkpoint_bytes(path)
        except CheckpointError as error:
            log.error("run %s: %s is not taken up: %s", run_id, path, error)
            continue
        new = NewCheckpoint(
            segment=number,
            iteration=iteration,
            path=f"{folder.path.name}/checkpoints/{path.name}",
            bytes=size,
            manifest_sha256=rundir.manifest_digest(path),
            reason="schedule",
        )
        row = record_checkpoint(session, run_id, new, token)
        if row is not None:
            append_event(session, run_id, "checkpoint", checkpoint_fields(row), segment=number, iteration=iteration)


def finish_removals(sessions: sessionmaker[Session], run_id: str, run_dir: Path) -> None:
    """Remove the files of rows that say removed. Anybody may; one that cannot be removed does not keep the others."""
    with sessions() as session:
        going = session.execute(
            select(Checkpoint.id, Checkpoint.path).where(
                Checkpoint.run_id == run_id, Checkpoint.status == "removed", Checkpoint.files_gone.is_(False)
            )
        ).all()
    for checkpoint, path in going:
        try:
            _remove_files(run_dir, path)
        except (CheckpointError, OSError) as error:
            log.error("run %s: the files of checkpoint %s cannot be removed: %s", run_id, checkpoint, error)
            continue
        with sessions.begin() as session:
            session.execute(update(Checkpoint).where(Checkpoint.id == checkpoint).values(files_gone=True))


def note_missing(sessions: sessionmaker[Session], run_id: str, run_dir: Path) -> None:
    """Say of checkpoints whose folder somebody took away that they are removed.

    Only where their segment's folder is there: a disk that is not mounted takes nothing away for good. Where not one is
    left they are called damaged, which a comparison takes back: more likely it is another disk than a hand.
    """
    with sessions() as session:
        present = present_checkpoints(session, run_id)
    suspects = [row.id for row in present if _is_missing(run_dir, row)]
    all_missing = len(suspects) == len(present)
    for checkpoint in suspects:
        with sessions.begin() as session:
            row = locked_checkpoint(session, run_id, checkpoint)
            if row is None or row.status == "removed" or not _is_missing(run_dir, row):
                continue
            if not all_missing:
                log.error("run %s: checkpoint %s is missing: %s", run_id, checkpoint, row.path)
                change_checkpoint(session, row, "removed", status="removed", status_detail=MISSING, files_gone=True)
            elif row.status != "damaged":
                log.error("run %s: none of its checkpoints is there: %s", run_id, row.path)
                change_checkpoint(session, row, "damaged", status="damaged", status_detail=ALL_MISSING)


def _is_missing(run_dir: Path, row: Checkpoint) -> bool:
    if not rundir.segment_dir(run_dir, row.segment).spec.is_file():
        return False
    try:
        return not stored_checkpoint(run_dir, row.path).exists()
    except CheckpointError:
        return False  # No place of a checkpoint: comparing its files says so.


def _remove_files(run_dir: Path, path: str) -> None:
    folder = stored_checkpoint(run_dir, path)
    if folder.parent.is_dir():
        with contextlib.suppress(FileNotFoundError):  # It was removed before, or by somebody else just now.
            remove_checkpoint(folder)
