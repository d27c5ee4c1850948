"""A claimed run in a database and a data folder of the test's own, without any process."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.orm import Session, sessionmaker

from ppo_core.rundir import MANIFEST, SegmentDir, checkpoint_bytes, new_checkpoint, segment_dir
from store import workers
from store.ids import new_id
from store.models import Run
from store.queue import claim
from store.runs import create_run, transition
from store.session import make_engine, session_factory
from worker.segment_start import Prepared, prepare


@dataclass
class Claimed:
    """One run, and what a worker does around its trainer."""

    sessions: sessionmaker[Session]
    data: Path
    run_id: str
    token: int = 0

    @property
    def run_dir(self) -> Path:
        return self.data / "runs" / self.run_id

    def claim(self) -> None:
        with self.sessions.begin() as session:
            claimed = claim(session, "w", 20)
            assert claimed is not None
            self.token = claimed.token

    def lose(self) -> None:
        with self.sessions.begin() as session:
            transition(session, self.run_id, "recovering")
            transition(session, self.run_id, "queued")

    def prepare(self) -> Prepared:
        return prepare(self.sessions, self.run_id, self.token, self.run_dir, 1)

    def segment(self, number: int = 1) -> SegmentDir:
        return segment_dir(self.run_dir, number)

    def save(self, iteration: int, number: int = 1) -> dict[str, Any]:
        """A checkpoint on disk; returns what a journal would say about it."""
        target = self.segment(number).checkpoint(iteration)
        with new_checkpoint(target) as folder:
            (folder / "state.json").write_text(str(iteration))
        digest = hashlib.sha256((target / MANIFEST).read_bytes()).hexdigest()
        sizes = {"bytes": checkpoint_bytes(target), "manifest_sha256": digest}
        return {"path": f"checkpoints/{target.name}", "reason": "schedule", "judge_score": None, **sizes}

    def run(self) -> Run:
        with self.sessions() as session:
            return session.get_one(Run, self.run_id)


@pytest.fixture
def claimed(database_url: str, tmp_path: Path) -> Iterator[Claimed]:
    engine = make_engine(database_url)
    sessions = session_factory(engine)
    run_id = new_id("r")
    with sessions.begin() as session:
        workers.register(session, worker_id="w", host="h", pid=1, cpu_slots=1, gpus=0, version="0", data_token="t")
        create_run(
            session,
            run_id=run_id,
            name="n",
            spec={"checkpoints": {"keep_last": 2, "keep_best": 0}},
            num_iterations=50,
            priority=0,
            gpus=0,
            created_by=None,
        )
    claimed = Claimed(sessions, tmp_path, run_id)
    claimed.claim()
    yield claimed
    engine.dispose()
