"""Deleting a run: its rows in one transaction, its folder by whoever looks at `deleted_runs` afterwards.

Only a run at its end goes, and none whose checkpoints another run started from: that run may need them again.
"""

from __future__ import annotations

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from store.checkpoints import MOST_NAMED
from store.commands import noun, open_commands
from store.models import Checkpoint, DeletedRun, Run, Segment
from store.runs import locked_run
from store.states import TERMINAL


class RunNotDeletable(Exception):
    """The run cannot be deleted as it stands; the message says why and what to do. `code` is a stable word."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def delete_run(session: Session, run_id: str, deleted_by: str | None) -> Run:
    """Delete a run with all that hangs on it, and leave word of its folder. Returns the row as it was.

    Raises:
        RunNotFound
        RunNotDeletable: it has not ended, is about to go on, or other runs started from its checkpoints.
    """
    run = locked_run(session, run_id)
    if run.state not in TERMINAL:
        raise RunNotDeletable("run_not_ended", f"{run.name} is {run.state}; stop it first, then delete it.")
    if open_now := open_commands(session, run_id):
        command = open_now[0]
        asked = noun(command)
        raise RunNotDeletable("run_not_ended", f"{run.name} has {asked} under way ({command.id}); stop it first.")
    if forks := _started_from(session, run_id):
        named = ", ".join(f"{name} ({fork})" for fork, name in forks[:MOST_NAMED])
        more = f" and {len(forks) - MOST_NAMED} more" if len(forks) > MOST_NAMED else ""
        raise RunNotDeletable(
            "run_needed",
            f"{run.name} is needed: checkpoints of it are what {named}{more} started from. Delete those first.",
        )
    session.add(DeletedRun(id=run.id, name=run.name, deleted_by=deleted_by))
    session.execute(delete(Run).where(Run.id == run_id).execution_options(synchronize_session=False))
    session.expunge(run)
    return run


def deleted_runs(session: Session) -> list[str]:
    """Runs whose folders are still to be removed, the longest waiting first."""
    return list(session.scalars(select(DeletedRun.id).order_by(DeletedRun.deleted_at, DeletedRun.id)))


def folder_is_gone(session: Session, run_id: str) -> None:
    """Nothing is left of a deleted run."""
    session.execute(delete(DeletedRun).where(DeletedRun.id == run_id))


def _started_from(session: Session, run_id: str) -> list[tuple[str, str]]:
    """(id, name) of other runs that have a segment which starts from one of this run's checkpoints."""
    own = select(Checkpoint.id).where(Checkpoint.run_id == run_id)
    statement = (
        select(Run.id, Run.name)
        .join(Segment, Segment.run_id == Run.id)
        .where(Segment.start_checkpoint.in_(own), Run.id != run_id)
        .distinct()
        .order_by(Run.name, Run.id)
    )
    return [(fork, name) for fork, name in session.execute(statement)]
