"""The fleet over REST: who is there, whether it shares the data folder, drain and enable."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker
from starlette.testclient import TestClient

from api.settings import ApiSettings
from store import workers
from store.models import AuditEntry, Worker
from store.workers import token_file


@pytest.fixture
def worker(settings: ApiSettings, sessions: sessionmaker[Session]) -> Iterator[str]:
    """A worker whose id has to be quoted in an address, and whose token lies in the service's data folder."""
    path = token_file(settings.data_dir, "box 1")
    path.parent.mkdir(exist_ok=True)
    path.write_text("token")
    with sessions.begin() as session:
        workers.register(
            session, worker_id="box 1", host="h", pid=1, cpu_slots=2, gpus=0, version="0.1", data_token="token"
        )
    yield "box 1"
    with sessions.begin() as session:
        session.delete(session.get_one(Worker, "box 1"))


def test_a_worker_is_listed_with_its_slots(viewer: TestClient, worker: str) -> None:
    (found,) = viewer.get("/v1/workers").json()["items"]
    assert (found["id"], found["state"], found["busy_slots"], found["data_shared"]) == (worker, "active", 0, True)
    assert [(slot["kind"], slot["index"], slot["run_id"]) for slot in found["slots"]] == [
        ("cpu", 0, None),
        ("cpu", 1, None),
    ]
    assert found["silent_s"] < 60


def test_another_data_folder_is_told(viewer: TestClient, worker: str, settings: ApiSettings) -> None:
    token_file(settings.data_dir, worker).write_text("of another worker")
    assert viewer.get("/v1/workers").json()["items"][0]["data_shared"] is False
    token_file(settings.data_dir, worker).unlink()
    assert viewer.get("/v1/workers").json()["items"][0]["data_shared"] is False


def test_drain_and_enable_are_recorded_and_may_be_repeated(
    operator: TestClient, worker: str, sessions: sessionmaker[Session]
) -> None:
    for _ in range(2):
        answer = operator.post("/v1/workers/box%201/drain")
        assert answer.status_code == 200
        assert (answer.json()["state"], answer.json()["drain_asked_by"]) == ("draining", "the operator")
    for _ in range(2):
        answer = operator.post("/v1/workers/box%201/enable")
        assert (answer.status_code, answer.json()["state"]) == (200, "active")
    with sessions() as session:
        told = session.scalars(select(AuditEntry.action).where(AuditEntry.target == worker).order_by(AuditEntry.id))
        assert told.all() == ["worker.drain", "worker.drain", "worker.enable", "worker.enable"]


def test_what_cannot_be_asked_of_a_worker(operator: TestClient, worker: str, sessions: sessionmaker[Session]) -> None:
    missing = operator.post("/v1/workers/nobody/drain")
    assert (missing.status_code, missing.json()["detail"]) == (404, "There is no worker 'nobody'.")
    with sessions.begin() as session:
        workers.set_state(session, worker, "draining")
    leaving = operator.post("/v1/workers/box%201/enable")
    assert (leaving.status_code, leaving.json()["code"]) == (409, "worker_leaving")
