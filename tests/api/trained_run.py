"""A run that looks as if it had trained, and what is asked of it over REST."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
from sqlalchemy import select, update
from sqlalchemy.orm import Session, sessionmaker
from starlette.testclient import TestClient

from ppo_core.rundir import MANIFEST, checkpoint_bytes, new_checkpoint
from store.models import Checkpoint, Command, Run, RunIteration
from store.runs import transition


@dataclass
class Trained:
    """A submitted run that looks as if it had trained, with real checkpoint folders."""

    operator: TestClient
    sessions: sessionmaker[Session]
    run_dir: Path
    id: str

    def save(self, iteration: int, segment: int = 1) -> str:
        path = f"segment-{segment:04d}/checkpoints/iter-{iteration:06d}"
        with new_checkpoint(self.run_dir / path) as folder:
            (folder / "weights").write_text(f"{segment} {iteration}")
        digest = hashlib.sha256((self.run_dir / path / MANIFEST).read_bytes()).hexdigest()
        name = f"k-{uuid4().hex[:16]}"
        with self.sessions.begin() as session:
            session.add(
                Checkpoint(
                    id=name,
                    run_id=self.id,
                    segment=segment,
                    iteration=iteration,
                    path=path,
                    bytes=checkpoint_bytes(self.run_dir / path),
                    manifest_sha256=digest,
                    reason="schedule",
                    lease_token=1,
                )
            )
        return name

    def reach(self, iteration: int, *states: str) -> None:
        with self.sessions.begin() as session:
            for number in range(1, iteration + 1):
                session.merge(RunIteration(run_id=self.id, segment=1, iteration=number, time="2030-01-01T00:00:00Z"))
            session.execute(update(Run).where(Run.id == self.id).values(iteration=iteration))
            for state in states:
                transition(session, self.id, state)

    def etag(self) -> str:
        return self.operator.get(f"/v1/runs/{self.id}").headers["ETag"]

    def rollback(self, checkpoint: str, key: str | None = None, etag: str | None = None, **body: Any) -> httpx.Response:
        headers = {"Idempotency-Key": key or uuid4().hex, "If-Match": etag or self.etag()}
        return self.operator.post(
            f"/v1/runs/{self.id}/rollback", json={"checkpoint": checkpoint, **body}, headers=headers
        )

    def preview(self, checkpoint: str, **body: Any) -> dict[str, Any]:
        url = f"/v1/runs/{self.id}/rollback?dry_run=true"
        answer = self.operator.post(url, json={"checkpoint": checkpoint, **body})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def fork(self, checkpoint: str, key: str | None = None, **body: Any) -> httpx.Response:
        headers = {"Idempotency-Key": key or uuid4().hex}
        return self.operator.post(f"/v1/runs/{self.id}/forks", json={"checkpoint": checkpoint, **body}, headers=headers)

    def ask(self, what: str) -> httpx.Response:
        return self.operator.post(f"/v1/runs/{self.id}/{what}")

    def num_commands(self) -> int:
        with self.sessions() as session:
            return len(session.scalars(select(Command).where(Command.run_id == self.id)).all())
