"""PATCH and DELETE of a run: only what was looked at, only what nothing needs, and nothing left over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import select, text, update
from sqlalchemy.orm import Session, sessionmaker
from starlette.testclient import TestClient

from api.settings import ApiSettings
from store.commands import request_command
from store.deletion import deleted_runs
from store.ids import new_id
from store.models import AuditEntry, Base, Command, Run, RunEvent, Segment
from store.runs import ForkStart, create_run
from tests.api.checkpoint_files import SavedRun

MakeRun = Callable[..., str]
ANY = {"If-Match": "*"}


@pytest.fixture
def ended(make_run: MakeRun, sessions: sessionmaker[Session], settings: ApiSettings) -> SavedRun:
    """A stopped run with a checkpoint and an event, row and file."""
    run_id = make_run(name="ended")
    with sessions.begin() as session:
        request_command(session, run_id, "stop", None, 60)
    saved = SavedRun(sessions, settings.data_dir / "runs" / run_id, run_id)
    saved.save(10)
    return saved


def _detail(answer: Any) -> tuple[int, str, str]:
    return answer.status_code, answer.json()["code"], answer.json()["detail"]


def test_delete_leaves_no_row_and_word_of_the_folder(
    operator: TestClient, ended: SavedRun, sessions: sessionmaker[Session]
) -> None:
    etag = operator.get(f"/v1/runs/{ended.run_id}").headers["ETag"]
    assert operator.delete(f"/v1/runs/{ended.run_id}", headers={"If-Match": etag}).status_code == 204
    with sessions() as session:
        for name, table in Base.metadata.tables.items():
            if "run_id" in table.columns:
                left = session.scalar(text(f"SELECT count(*) FROM {name} WHERE run_id = :run"), {"run": ended.run_id})
                assert left == 0, name
        assert ended.run_id in deleted_runs(session)
        told = session.scalars(select(AuditEntry).where(AuditEntry.target == ended.run_id)).all()
        assert [(entry.action, entry.detail["name"]) for entry in told] == [("run.delete", "ended")]
    assert operator.get(f"/v1/runs/{ended.run_id}").status_code == 404
    assert operator.delete(f"/v1/runs/{ended.run_id}", headers=ANY).status_code == 404
    assert ended.run_id not in [run["id"] for run in operator.get("/v1/runs").json()["items"]]


def test_delete_needs_what_was_looked_at(operator: TestClient, ended: SavedRun) -> None:
    assert operator.delete(f"/v1/runs/{ended.run_id}").status_code == 428
    assert operator.delete(f"/v1/runs/{ended.run_id}", headers={"If-Match": '"0"'}).status_code == 412
    assert operator.get(f"/v1/runs/{ended.run_id}").status_code == 200


@pytest.mark.parametrize("state", ["queued", "running", "paused", "recovering"])
def test_a_run_that_has_not_ended_is_stopped_first(
    operator: TestClient, make_run: MakeRun, sessions: sessionmaker[Session], state: str
) -> None:
    run_id = make_run(name="busy")
    way = {"queued": [], "running": ["starting", "running"], "paused": ["starting", "running", "paused"]}
    for step in way.get(state, ["starting", "recovering"]):
        with sessions.begin() as session:
            session.execute(update(Run).where(Run.id == run_id).values(state=step))
    answer = operator.delete(f"/v1/runs/{run_id}", headers=ANY)
    assert _detail(answer) == (409, "run_not_ended", f"busy is {state}; stop it first, then delete it.")


def test_a_run_that_is_about_to_go_back_is_not_deleted(
    operator: TestClient, ended: SavedRun, sessions: sessionmaker[Session]
) -> None:
    with sessions.begin() as session:
        session.add(
            Command(
                id=(command := new_id("c")), run_id=ended.run_id, kind="rollback", deadline_at=text("now()"),
                payload={"checkpoint": f"k-{ended.run_id}-1-10"},
            )
        )  # fmt: skip
    status, code, detail = _detail(operator.delete(f"/v1/runs/{ended.run_id}", headers=ANY))
    assert (status, code) == (409, "run_not_ended")
    assert f"a roll back under way ({command})" in detail


def test_forks_that_started_from_it_are_named(
    operator: TestClient, ended: SavedRun, sessions: sessionmaker[Session]
) -> None:
    fork = new_id("r")
    with sessions.begin() as session:
        create_run(
            session, run_id=fork, name="younger", spec={}, num_iterations=10, priority=0, gpus=0, created_by=None,
            fork=ForkStart(f"k-{ended.run_id}-1-10", 10),
        )  # fmt: skip
        session.add(Segment(run_id=ended.run_id, number=2, kind="rollback", spec={},
                            start_checkpoint=f"k-{ended.run_id}-1-10"))  # fmt: skip
    status, code, detail = _detail(operator.delete(f"/v1/runs/{ended.run_id}", headers=ANY))
    assert (status, code) == (409, "run_needed")
    assert f"younger ({fork})" in detail
    with sessions.begin() as session:
        request_command(session, fork, "stop", None, 60)
    assert operator.delete(f"/v1/runs/{fork}", headers=ANY).status_code == 204
    assert operator.delete(f"/v1/runs/{ended.run_id}", headers=ANY).status_code == 204, "its own segments are no reason"


def test_the_key_that_made_a_deleted_run_makes_no_other(
    operator: TestClient, spec: dict[str, Any], sessions: sessionmaker[Session]
) -> None:
    headers = {"Idempotency-Key": new_id("x")}
    run_id = operator.post("/v1/runs", json={"spec": spec}, headers=headers).json()["id"]
    operator.post(f"/v1/runs/{run_id}/stop")
    assert operator.delete(f"/v1/runs/{run_id}", headers=ANY).status_code == 204
    assert _detail(operator.post("/v1/runs", json={"spec": spec}, headers=headers))[:2] == (409, "run_deleted")


def test_a_run_is_renamed_noted_and_moved_in_the_queue(
    operator: TestClient, make_run: MakeRun, sessions: sessionmaker[Session]
) -> None:
    run_id = make_run(name="old")
    seen = operator.get(f"/v1/runs/{run_id}")
    change = {"name": "new", "notes": "first try\nof many", "priority": 7}
    answer = operator.patch(f"/v1/runs/{run_id}", json=change, headers={"If-Match": seen.headers["ETag"]})
    assert answer.status_code == 200
    assert {name: answer.json()[name] for name in change} == change
    assert answer.headers["ETag"] != seen.headers["ETag"]
    stale = operator.patch(f"/v1/runs/{run_id}", json=change, headers={"If-Match": seen.headers["ETag"]})
    assert stale.status_code == 412
    again = operator.patch(f"/v1/runs/{run_id}", json=change, headers={"If-Match": answer.headers["ETag"]})
    assert again.headers["ETag"] == answer.headers["ETag"], "nothing changed"
    with sessions() as session:
        notes = select(RunEvent.payload, RunEvent.actor).where(RunEvent.run_id == run_id, RunEvent.type == "note")
        ((payload, actor),) = session.execute(notes).all()
    assert actor == "the operator"
    assert payload["message"] == "renamed from old to new; notes changed; priority changed from 0 to 7"
    cleared = operator.patch(f"/v1/runs/{run_id}", json={"notes": None}, headers=ANY).json()
    assert (cleared["notes"], cleared["name"], cleared["priority"]) == (None, "new", 7)


@pytest.mark.parametrize(
    "body", [{}, {"name": ""}, {"name": "a\nb"}, {"name": None}, {"priority": 101}, {"priority": None}, {"state": "x"}]
)
def test_a_change_without_sense_is_refused(operator: TestClient, make_run: MakeRun, body: dict[str, Any]) -> None:
    run_id = make_run()
    assert operator.patch(f"/v1/runs/{run_id}", json=body, headers=ANY).status_code == 422
    assert operator.patch(f"/v1/runs/{run_id}", json={"name": "x"}).status_code == 428
    assert operator.get(f"/v1/runs/{run_id}").json()["name"] == "test"
