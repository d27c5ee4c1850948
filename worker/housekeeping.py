"""The reconciler's share in files: runs at rest are looked through once, deleted checkpoints and runs lose theirs.

A look takes a second at most, or one removal: leases do not wait for a disk.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator

from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

from store.deletion import deleted_runs, folder_is_gone
from store.events import RunNotFound
from store.models import Checkpoint, Run
from store.session import AWAY, is_row_held
from store.states import LIVE
from worker.agreement import agree, finish_removals
from worker.folders import remove_some
from worker.settings import WorkerSettings

log = logging.getLogger(__name__)

LOOK_S = 1.0


class Housekeeping:
    """Goes on where the last look ended."""

    def __init__(self, sessions: sessionmaker[Session], settings: WorkerSettings) -> None:
        self._sessions = sessions
        self._settings = settings
        self._unseen: deque[str] | None = None
        self._complained: set[str] = set()

    def look(self) -> None:
        """Some of what there is to do. A fault with one run does not keep the others waiting."""
        until = time.monotonic() + LOOK_S
        for run_id in self._due():
            try:
                agree(self._sessions, run_id, self._settings.run_dir(run_id))
            except AWAY as error:
                if not is_row_held(error):
                    self._unseen = deque([run_id, *(self._unseen or ())])
                    raise
                log.warning("run %s is held by somebody else; it is looked through later", run_id)
                self._unseen = deque([*(self._unseen or ()), run_id])
                return
            except RunNotFound:
                continue  # deleted meanwhile
            except Exception:
                log.exception("checkpoints of run %s", run_id)
            if time.monotonic() >= until:
                return
        with self._sessions() as session:
            going = select(Checkpoint.run_id).where(Checkpoint.status == "removed", Checkpoint.files_gone.is_(False))
            deleted = session.scalars(going.distinct()).all()
        for run_id in deleted:
            finish_removals(self._sessions, run_id, self._settings.run_dir(run_id))
            if time.monotonic() >= until:
                return
        self._remove_deleted(until)

    def _remove_deleted(self, until: float) -> None:
        """Remove folders of deleted runs. One that cannot be removed stays listed and does not keep the others."""
        if not (self._settings.data_dir / "runs").is_dir():
            return  # The disk is away, and with it what is to be removed.
        with self._sessions() as session:
            deleted = deleted_runs(session)
        for run_id in deleted:
            folder = self._settings.run_dir(run_id)
            try:
                gone = remove_some(folder, until)
            except OSError as error:
                if run_id not in self._complained:
                    log.error("the folder of deleted run %s cannot be removed: %s", run_id, error)
                self._complained.add(run_id)
                continue
            if not gone:
                return
            with self._sessions.begin() as session:
                folder_is_gone(session, run_id)
            log.info("the folder of deleted run %s is removed", run_id)

    def _due(self) -> Iterator[str]:
        """The runs at rest that were not looked through since this process started."""
        if self._unseen is None:
            with self._sessions() as session:
                at_rest = Run.state.not_in([*LIVE, "recovering"])
                self._unseen = deque(session.scalars(select(Run.id).where(Run.attempt > 0, at_rest)))
        while self._unseen:
            yield self._unseen.popleft()
