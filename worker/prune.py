"""Removes checkpoints that `ppo_core.retention` lets go, in a thread: hashing a large one takes minutes.

Nothing goes before a newer checkpoint was compared with its manifest, and nothing without the database, since only it
knows what is pinned and what a segment or a fork starts from. The row says removed before the files go.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from sqlalchemy import select, update
from sqlalchemy.orm import Session, sessionmaker

from ppo_core.errors import CheckpointError
from ppo_core.retention import Kept, removable
from ppo_core.rundir import remove_checkpoint, verify_checkpoint
from ppo_core.spec.groups import CheckpointsConfig
from store.checkpoints import mark_removed, present_checkpoints, starting_points
from store.models import Checkpoint
from store.session import AWAY

log = logging.getLogger(__name__)


def rules_of(spec: dict[str, Any]) -> CheckpointsConfig:
    """What a stored spec says about keeping; all stay if it cannot be read."""
    try:
        return CheckpointsConfig.model_validate(spec.get("checkpoints") or {})
    except ValidationError:
        return CheckpointsConfig(keep_last=-1)


class Pruner:
    """Looks through a run's checkpoints whenever it is told that there is a new one."""

    def __init__(
        self, sessions: sessionmaker[Session], run_id: str, token: int, run_dir: Path, rules: CheckpointsConfig
    ) -> None:
        self._sessions = sessions
        self._run_id = run_id
        self._token = token
        self._run_dir = run_dir
        self._rules = rules
        self._verified: dict[str, bool] = {}
        self._wanted = threading.Event()
        self._thread = threading.Thread(target=self._work, name="prune", daemon=True)
        self._started = False

    def look(self) -> None:
        """There is a new checkpoint."""
        if not self._started:
            self._started = True
            self._thread.start()
        self._wanted.set()

    def _work(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            try:
                self.prune()
            except (*AWAY, OSError) as error:  # the next checkpoint, or the next attempt, tries again
                log.warning("pruning was put off: %s", error)

    def prune(self) -> list[str]:
        """Verify the newest checkpoint and remove what may go; returns the removed ids."""
        with self._sessions() as session:
            rows = present_checkpoints(session, self._run_id)
            needed = starting_points(session, self._run_id)
            half_gone = session.scalars(
                select(Checkpoint).where(Checkpoint.run_id == self._run_id, Checkpoint.status == "removed")
            ).all()
        for row in half_gone:  # a crash came between row and files
            self._remove_files(row)
        for row in reversed(rows):
            if self._verify(row):
                break
        kept = [
            Kept(
                id=row.id,
                segment=row.segment,
                iteration=row.iteration,
                verified=False if row.status == "damaged" else self._verified.get(row.id),
                pinned=row.pinned,
                judge_score=row.judge_score,
                protected_reason=needed.get(row.id),
            )
            for row in rows
        ]
        by_id = {row.id: row for row in rows}
        gone = []
        for removal in removable(kept, self._rules):
            with self._sessions.begin() as session:
                agreed = mark_removed(session, self._run_id, removal.id, self._token, removal.reason)
            if agreed:
                self._remove_files(by_id[removal.id])
                gone.append(removal.id)
        return gone

    def _verify(self, row: Checkpoint) -> bool:
        if row.id not in self._verified:
            try:
                verify_checkpoint(self._run_dir / row.path)
                self._verified[row.id] = True
            except CheckpointError as error:
                self._verified[row.id] = False
                log.error("checkpoint %s is damaged: %s", row.id, error)
                with self._sessions.begin() as session:
                    damaged = update(Checkpoint).where(Checkpoint.id == row.id)
                    session.execute(damaged.values(status="damaged", status_detail=str(error)))
        return self._verified[row.id]

    def _remove_files(self, row: Checkpoint) -> None:
        with contextlib.suppress(FileNotFoundError):
            remove_checkpoint(self._run_dir / row.path)
