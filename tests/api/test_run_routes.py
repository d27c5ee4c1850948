"""Listing, reading and stopping runs, and what hangs on them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import delete, update
from sqlalchemy.orm import Session, sessionmaker
from starlette.testclient import TestClient

from store.models import Checkpoint, Run, Sample, Worker, WorkerSlot
from store.run_read import run_health
from store.runs import transition
from store.states import MOVES

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def walk(client: TestClient, limit: int, between: Callable[[], object] | None = None, **params: Any) -> list[str]:
    seen: list[str] = []
    cursor = None
    while True:
        page = client.get(
            "/v1/runs", params={"limit": limit, **({"cursor": cursor} if cursor else {}), **params}
        ).json()
        seen += [run["id"] for run in page["items"]]
        cursor = page["next"]
        if cursor is None:
            return seen
        if between:
            between()


def test_paging_shows_each_run_once_while_others_arrive(viewer: TestClient, make_run: Callable[..., str]) -> None:
    before = [make_run() for _ in range(47)]
    newcomers: list[str] = []
    seen = walk(viewer, 5, between=lambda: newcomers.extend([make_run(), make_run()]))
    assert newcomers
    assert len(seen) == len(set(seen))
    assert set(before) <= set(seen)
    assert not set(newcomers) & set(seen)
    assert [run for run in seen if run in before] == before[::-1]


def test_runs_of_one_moment_are_paged_too(
    viewer: TestClient, make_run: Callable[..., str], sessions: sessionmaker[Session]
) -> None:
    mine = [make_run(name="same moment") for _ in range(7)]
    with sessions.begin() as session:
        session.execute(update(Run).where(Run.id.in_(mine)).values(created_at=NOW))
    seen = walk(viewer, 2)
    assert sorted(run for run in seen if run in mine) == sorted(mine)


def test_a_list_can_be_cut_down_to_states(
    viewer: TestClient, operator: TestClient, make_run: Callable[..., str]
) -> None:
    run_id = make_run()
    operator.post(f"/v1/runs/{run_id}/stop")
    assert run_id in walk(viewer, 200, state=["stopped", "failed"])
    assert run_id not in walk(viewer, 200, state="queued")


@pytest.mark.parametrize(
    "params",
    [
        {"limit": 0},
        {"limit": -1},
        {"limit": 10**9},
        {"limit": "x"},
        {"cursor": "x"},
        {"cursor": "W10"},
        {"cursor": "WzEsMl0"},
        {"state": "dancing"},
    ],
)
def test_odd_list_parameters_are_422_with_a_pointer(params: dict[str, Any], viewer: TestClient) -> None:
    answer = viewer.get("/v1/runs", params=params)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"].startswith(f"/query/{next(iter(params))}")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/runs/r-none",
        "/v1/runs/%00",
        "/v1/runs/%ff",
        "/v1/runs/r-none/commands/c-none",
        "/v1/runs/r-none/metrics",
        "/v1/runs/r-none/samples",
        "/v1/runs/r-none/checkpoints",
        "/v1/runs/r-none/events",
        "/v1/runs/r-none/logs",
        "/v1/samples/0/tokens",
        "/v1/samples/99999999999999999999/tokens",
        "/v1/runs/..%2f..%2fetc/logs",
    ],
)
def test_what_is_not_there_is_4xx(path: str, viewer: TestClient) -> None:
    answer = viewer.get(path)
    assert answer.status_code in (404, 422)
    assert answer.json()["code"] in ("not_found", "bad_value", "bad_request")


# Stop


def test_stopping_a_queued_run_stops_it_at_once(operator: TestClient, make_run: Callable[..., str]) -> None:
    run_id = make_run()
    answer = operator.post(f"/v1/runs/{run_id}/stop")
    assert answer.status_code == 202
    command = answer.json()
    assert (command["kind"], command["status"], command["requested_by"]) == ("stop", "done", "the operator")
    assert operator.get(f"/v1/runs/{run_id}").json()["state"] == "stopped"
    assert operator.get(f"/v1/runs/{run_id}/commands/{command['id']}").json() == command


def test_stopping_twice_gives_the_same_command(
    operator: TestClient, make_run: Callable[..., str], sessions: sessionmaker[Session]
) -> None:
    run_id = make_run()
    with sessions.begin() as session:
        session.execute(update(Run).where(Run.id == run_id).values(state="starting"))
    with sessions.begin() as session:
        session.execute(update(Run).where(Run.id == run_id).values(state="running"))
    first = operator.post(f"/v1/runs/{run_id}/stop").json()
    second = operator.post(f"/v1/runs/{run_id}/stop")
    assert second.status_code == 202
    assert second.json()["id"] == first["id"]
    detail = operator.get(f"/v1/runs/{run_id}").json()
    assert detail["state"] == "stopping"
    assert [command["id"] for command in detail["open_commands"]] == [first["id"]]


def test_stopping_what_has_ended_is_409_and_says_what_is_allowed(
    operator: TestClient, make_run: Callable[..., str]
) -> None:
    run_id = make_run()
    operator.post(f"/v1/runs/{run_id}/stop")
    answer = operator.post(f"/v1/runs/{run_id}/stop")
    assert answer.status_code == 409
    assert answer.json()["allowed"] == sorted(MOVES["stopped"])
    name = operator.get(f"/v1/runs/{run_id}").json()["name"]
    assert answer.json()["detail"] == f"{name} has already stopped at iteration 0."
    unknown = operator.post("/v1/runs/r-none/stop")
    assert unknown.status_code == 404
    assert unknown.json()["detail"] == operator.get("/v1/runs/r-none").json()["detail"] == "There is no run 'r-none'."


# Kill


def test_killing_what_waits_cancels_it_and_what_has_ended_is_409(
    operator: TestClient, make_run: Callable[..., str]
) -> None:
    run_id = make_run()
    command = operator.post(f"/v1/runs/{run_id}/kill")
    assert command.status_code == 202
    assert (command.json()["kind"], command.json()["status"]) == ("kill", "done")
    run = operator.get(f"/v1/runs/{run_id}").json()
    assert (run["state"], run["reason_code"]) == ("cancelled", "killed")
    again = operator.post(f"/v1/runs/{run_id}/kill")
    assert again.status_code == 409
    assert again.json()["detail"] == f"{run['name']} has already been cancelled at iteration 0."


def test_killing_supersedes_a_stop_and_can_be_followed(
    operator: TestClient, make_run: Callable[..., str], sessions: sessionmaker[Session]
) -> None:
    run_id = make_run()
    with sessions.begin() as session:
        transition(session, run_id, "starting")
    stop = operator.post(f"/v1/runs/{run_id}/stop").json()["id"]
    kill = operator.post(f"/v1/runs/{run_id}/kill").json()
    assert kill["status"] == "pending"
    assert operator.post(f"/v1/runs/{run_id}/kill").json()["id"] == kill["id"]
    assert operator.get(f"/v1/runs/{run_id}/commands/{stop}").json()["status"] == "superseded"
    assert operator.get(f"/v1/runs/{run_id}/commands/{kill['id']}").json() == kill
    assert operator.get(f"/v1/runs/{run_id}").json()["state"] == "killing"
    refused = operator.post(f"/v1/runs/{run_id}/stop")
    assert (refused.status_code, "is being killed" in refused.json()["detail"]) == (409, True)


# Derived


@pytest.mark.parametrize(
    ("columns", "health"),
    [
        ({"state": "queued"}, "ok"),
        ({"state": "running", "lease_expires_at": NOW + timedelta(seconds=1)}, "ok"),
        ({"state": "running", "lease_expires_at": NOW - timedelta(seconds=1)}, "unreachable"),
        ({"state": "running", "progress_deadline_at": NOW - timedelta(seconds=1)}, "late"),
        ({"state": "running", "infrastructure_failures": 1}, "degraded"),
        ({"state": "recovering"}, "degraded"),
        ({"state": "failed", "lease_expires_at": NOW - timedelta(seconds=1)}, "ok"),
    ],
)
def test_health_is_derived_from_two_clocks(columns: dict[str, Any], health: str) -> None:
    run = Run(**{"infrastructure_failures": 0, **columns})
    assert run_health(run, NOW) == health


@pytest.mark.parametrize(
    ("columns", "health", "code", "words"),
    [
        ({"lease_expires_at": datetime(2020, 1, 1, tzinfo=UTC)}, "unreachable", "unreachable", "No sign of life"),
        ({"progress_deadline_at": datetime(2020, 1, 1, tzinfo=UTC)}, "late", "late", "s late with it"),
        (
            {"infrastructure_failures": 2},
            "degraded",
            "trainer_lost",
            "Was lost 2 times and restarted from the beginning",
        ),
    ],
)
def test_bad_health_is_explained_wherever_a_run_is_read(
    viewer: TestClient, make_run: Callable[..., str], sessions: sessionmaker[Session],
    columns: dict[str, Any], health: str, code: str, words: str,
) -> None:  # fmt: skip
    run_id = make_run()
    with sessions.begin() as session:
        transition(session, run_id, "starting")
        transition(session, run_id, "recovering", reason_code="trainer_lost", reason_detail="signal 9")
    lost = viewer.get(f"/v1/runs/{run_id}").json()
    assert (lost["health"], lost["reason_code"], lost["reason_detail"]) == ("degraded", "trainer_lost", "signal 9")
    assert lost["hint"].startswith("Nothing needs doing")
    with sessions.begin() as session:
        for state in ("queued", "starting", "running"):
            transition(session, run_id, state)
    sound = viewer.get(f"/v1/runs/{run_id}").json()
    assert (sound["health"], sound["reason_code"], sound["reason_detail"], sound["hint"]) == ("ok", None, None, None)
    with sessions.begin() as session:
        session.execute(update(Run).where(Run.id == run_id).values(**columns))
    run = viewer.get(f"/v1/runs/{run_id}").json()
    assert (run["health"], run["reason_code"]) == (health, code)
    assert words in run["reason_detail"]
    assert run["hint"]
    if health == "degraded":
        assert "`ppo logs RUN --supervisor`" in run["hint"]
    listed = next(row for row in viewer.get("/v1/runs").json()["items"] if row["id"] == run_id)
    assert listed["reason_code"] == code
    assert listed["hint"] == run["hint"]


def test_a_list_can_be_cut_down_to_what_begins_so(viewer: TestClient, make_run: Callable[..., str]) -> None:
    run_id, other = make_run(name="50%_off now"), make_run(name="50 of them")

    def found(match: str) -> list[str]:
        return [run["id"] for run in viewer.get("/v1/runs", params={"match": match}).json()["items"]]

    assert found("50%_") == [run_id], "no character of it is a wildcard"
    assert found(run_id[:12]) == [run_id]
    assert found("50") == [other, run_id]
    assert found("off") == []


def test_a_queued_run_says_why_it_waits(
    viewer: TestClient, make_run: Callable[..., str], sessions: sessionmaker[Session]
) -> None:
    def reason(run_id: str) -> str:
        text: str = viewer.get(f"/v1/runs/{run_id}").json()["waiting_reason"]
        return text

    big, small = make_run(gpus=2, priority=50), make_run(priority=50)
    assert reason(small) == "No worker is connected."
    with sessions.begin() as session:
        session.add(Worker(id="w-1", host="here", pid=1, cpu_slots=1, gpus=1, version="0", data_token="t"))
        session.flush()
        session.add(WorkerSlot(worker_id="w-1", kind="cpu", index=0, run_id=small))
    try:
        assert reason(big).startswith("Needs 2 GPUs; the largest worker that was ever connected has 1: connect")
        with sessions.begin() as session:
            gone = {"id": "w-2", "state": "gone", "host": "h", "pid": 1, "cpu_slots": 1, "gpus": 4}
            session.add(Worker(**gone, version="0", data_token="t"))
        assert reason(big) == "Needs 2 GPUs; the largest connected worker has 1."
        assert reason(small) == "Next in the queue; CPU slots are held by test."
        with sessions.begin() as session:
            later = datetime.now(UTC) + timedelta(seconds=40)
            session.execute(update(Run).where(Run.id == small).values(not_before=later))
        assert "s more before it is tried again" in reason(small)
    finally:
        with sessions.begin() as session:
            session.execute(delete(Worker).where(Worker.id.in_(["w-1", "w-2"])))


# Samples and checkpoints

ODD_TEXT = "<script>alert(1)</script> \u2028 \x1b[31m \U0001f600 \u202e"


@pytest.fixture
def sampled(make_run: Callable[..., str], sessions: sessionmaker[Session]) -> str:
    run_id = make_run()
    with sessions.begin() as session:
        for iteration in range(1, 6):
            for index in range(4):
                session.add(
                    Sample(
                        run_id=run_id,
                        segment=1,
                        iteration=iteration,
                        kind="held_out" if index == 3 else "train",
                        index=index,
                        prompt="the film",
                        response=ODD_TEXT,
                        score=None if index == 2 else 0.5,
                        length=2,
                        finish_reason="stop",
                        tokens={"ids": [1, 2], "judge_score": 0.75}
                        if index == 3
                        else {"ids": [1, 2], "texts": ["a", "b"], "kl": [0.1, None]},
                    )
                )
    return run_id


def test_samples_are_paged_newest_iteration_first(viewer: TestClient, sampled: str) -> None:
    seen, cursor = [], None
    while True:
        params = {"limit": 3, **({"cursor": cursor} if cursor else {})}
        page = viewer.get(f"/v1/runs/{sampled}/samples", params=params).json()
        seen += [(item["iteration"], item["index"]) for item in page["items"]]
        cursor = page["next"]
        if cursor is None:
            break
    assert seen == [(iteration, index) for iteration in (5, 4, 3, 2, 1) for index in range(4)]


def test_samples_can_be_cut_down_and_keep_their_text(viewer: TestClient, sampled: str) -> None:
    params = {"iteration": 2, "kind": "train"}
    items = viewer.get(f"/v1/runs/{sampled}/samples", params=params).json()["items"]
    assert [item["index"] for item in items] == [0, 1, 2]
    assert items[0]["response"] == ODD_TEXT
    assert items[2]["score"] is None
    tokens = viewer.get(f"/v1/samples/{items[0]['id']}/tokens").json()
    assert tokens["kl"] == [0.1, None]
    assert tokens["rewards"] is None
    (held_out,) = viewer.get(f"/v1/runs/{sampled}/samples", params={"iteration": 2, "kind": "held_out"}).json()["items"]
    of_held_out = viewer.get(f"/v1/samples/{held_out['id']}/tokens").json()
    assert (of_held_out["texts"], of_held_out["judge_score"], of_held_out["judge_against_last"]) == ([], 0.75, None)
    assert viewer.get(f"/v1/runs/{sampled}/samples", params={"cursor": "x"}).status_code == 422


def test_checkpoints_are_listed_oldest_first(
    viewer: TestClient, make_run: Callable[..., str], sessions: sessionmaker[Session]
) -> None:
    run_id = make_run()
    with sessions.begin() as session:
        for iteration in (20, 100, 40):
            session.add(
                Checkpoint(
                    id=f"k-{run_id}-{iteration}",
                    run_id=run_id,
                    segment=1,
                    iteration=iteration,
                    path=f"segment-0001/checkpoints/iter-{iteration:06d}",
                    bytes=2**40,
                    manifest_sha256="0" * 64,
                    reason="schedule",
                    judge_score=float("nan"),
                    lease_token=1,
                )
            )
    page = viewer.get(f"/v1/runs/{run_id}/checkpoints").json()
    assert [item["iteration"] for item in page["items"]] == [20, 40, 100]
    assert page["items"][0]["judge_score"] is None
    assert page["items"][0]["bytes"] == 2**40
