"""Removes checkpoints that `ppo_core.retention` lets go, in a thread: hashing a large one takes minutes.

Nothing goes before a newer checkpoint was compared with its manifest, and nothing without the database, since only it
knows what is pinned and what a segment or a fork starts from. The row says removed before the files go.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from sqlalchemy.orm import Session, sessionmaker

from ppo_core.errors import CheckpointError
from ppo_core.rundir import check_stored, segments, set_leftovers_aside
from ppo_core.spec.groups import CheckpointsConfig
from store import retention
from store.checkpoints import present_checkpoints, record_verification
from store.models import Checkpoint
from store.runs import RunNotFound
from store.session import AWAY
from worker.agreement import finish_removals, note_missing

log = logging.getLogger(__name__)

FINISH_EVERY_S = 0.2


class Pruner:
    """Looks through a run's checkpoints when its attempt begins, and whenever it is told that there is a new one."""

    def __init__(
        self, sessions: sessionmaker[Session], run_id: str, token: int, run_dir: Path, rules: CheckpointsConfig
    ) -> None:
        self._sessions = sessions
        self._run_id = run_id
        self._token = token
        self._run_dir = run_dir
        self._rules = rules
        self._wanted = threading.Event()
        self._thread = threading.Thread(target=self._work, name="prune", daemon=True)
        self._started = False
        self._idle = threading.Event()
        self._cleared = False

    def look(self) -> None:
        """There is a new checkpoint, or a new attempt."""
        if not self._started:
            self._started = True
            self._thread.start()
        self._idle.clear()
        self._wanted.set()

    def finish(self, give_up: Callable[[], bool]) -> None:
        """Look once more and wait for the end of it: after a run's last save nobody else looks for long."""
        self.look()
        while not self._idle.wait(FINISH_EVERY_S) and not give_up():
            pass

    def _work(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            try:
                self.prune()
            except (*AWAY, OSError, RunNotFound) as error:  # the next checkpoint, or the next attempt, tries again
                log.warning("pruning was put off: %s", error)
            except Exception:  # The thread goes on: a fault with one checkpoint is none of the next ones'.
                log.exception("pruning broke off; the next checkpoint tries again")
            if not self._wanted.is_set():
                self._idle.set()

    def prune(self) -> list[str]:
        """Verify the newest checkpoint and remove what may go; returns the removed ids."""
        if not self._cleared:
            for segment in segments(self._run_dir)[:-1]:  # only in the newest does a trainer write
                for path in set_leftovers_aside(segment):
                    shutil.rmtree(path, ignore_errors=True)
            self._cleared = True
        finish_removals(self._sessions, self._run_id, self._run_dir)  # a crash may have come between row and files
        note_missing(self._sessions, self._run_id, self._run_dir)
        with self._sessions() as session:
            rows = present_checkpoints(session, self._run_id)
        for row in reversed(rows):
            if row.status == "good" and (row.verified_at is not None or self._verify(row)):
                break
        with self._sessions() as session:
            decided = retention.decide(session, self._run_id, self._rules)
        gone = []
        for checkpoint in (decision.checkpoint.id for decision in reversed(decided) if not decision.stays):
            with self._sessions.begin() as session:
                if retention.remove(session, self._run_id, checkpoint, self._rules, self._token):
                    gone.append(checkpoint)
            finish_removals(self._sessions, self._run_id, self._run_dir)
        return gone

    def _verify(self, row: Checkpoint) -> bool:
        fault = None
        try:
            check_stored(self._run_dir, row.path, row.manifest_sha256)
        except CheckpointError as error:
            fault = str(error)
            log.error("checkpoint %s is damaged: %s", row.id, fault)
        with self._sessions.begin() as session:
            record_verification(session, self._run_id, row.id, fault)
        return fault is None
