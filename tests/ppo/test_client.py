"""The client against the real service."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from sqlalchemy.orm import Session, sessionmaker

import ppo
from api.main import create_app
from api.settings import ApiSettings
from ppo import wire
from ppo.client import (
    AccessError,
    Client,
    NotFoundError,
    RefusedError,
    RequestError,
    UnreachableError,
    WaitTimeoutError,
)
from ppo.connection import PAGE
from store import keys, states
from store.commands import request_command
from store.events import append_event
from store.models import Sample
from store.session import make_engine, session_factory
from tests.api.live_server import ServerProcess, in_thread


@pytest.fixture
def sessions(database_url: str) -> Iterator[sessionmaker[Session]]:
    engine = make_engine(database_url)
    yield session_factory(engine)
    engine.dispose()


@pytest.fixture
def key(sessions: sessionmaker[Session]) -> str:
    with sessions.begin() as session:
        return keys.create_key(session, "ci", "operator")[1]


@pytest.fixture
def settings(database_url: str, tmp_path: Path) -> ApiSettings:
    return ApiSettings(DATABASE_URL=database_url, REDIS_URL=None, data_dir=tmp_path / "data", roots=(tmp_path,))


@pytest.fixture
def client(settings: ApiSettings, key: str) -> Iterator[Client]:
    with in_thread(settings) as (url, _), Client(url, key) as client:
        yield client


@pytest.fixture
def spec(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text('{"max_position_embeddings": 128}')
    (tmp_path / "policy" / "model.safetensors").write_bytes(b"")
    (tmp_path / "train.jsonl").write_text('{"prompt": "the film"}\n' * 64)
    return {
        "name": "from a client",
        "policy": {"model": "policy"},
        "data": {"prompts": "train.jsonl"},
        "reward": {"sources": [{"kind": "sequence_classifier", "model": "policy"}]},
    }


def test_a_run_from_submit_to_stopped(client: Client, spec: dict[str, Any], sessions: sessionmaker[Session]) -> None:
    assert client.me()["role"] == "operator"
    assert client.dry_run(spec)["spec"]["name"] == "from a client"
    assert not list(client.runs())
    run = client.submit(spec)
    assert [listed["id"] for listed in client.runs()] == [run["id"]]
    assert client.run(run["id"])["spec"]["iterations"] == 100
    with sessions.begin() as session:
        append_event(session, run["id"], "metrics", {"kl/coef": 0.05}, segment=1, iteration=1)
    command = client.stop(run["id"])
    assert client.command(run["id"], command["id"])["status"] == "done"
    events = list(client.follow(run["id"]))
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert [event["type"] for event in events][:2] == ["state", "metrics"]
    assert client.wait(run["id"])["state"] == "stopped"
    assert client.wait(run["id"], timeout_s=0)["state"] == "stopped"


def test_following_a_run_that_has_ended_ends(client: Client, spec: dict[str, Any]) -> None:
    run = client.submit(spec)
    client.stop(run["id"])
    seq = client.run(run["id"])["event_seq"]
    begun = time.monotonic()
    assert [event["seq"] for event in client.follow(run["id"], after=seq - 1)] == [seq]
    assert not list(client.follow(run["id"]))[seq:]
    assert time.monotonic() - begun < 10


def test_waiting_gives_up_in_time_and_says_so(client: Client, spec: dict[str, Any]) -> None:
    run = client.submit(spec)
    begun = time.monotonic()
    with pytest.raises(WaitTimeoutError, match="queued"):
        client.wait(run["id"], timeout_s=0.5)
    assert time.monotonic() - begun < 5


def test_a_wait_hears_of_the_end_at_once(client: Client, spec: dict[str, Any], sessions: sessionmaker[Session]) -> None:
    run = client.submit(spec)

    def stop() -> None:
        with sessions.begin() as session:
            request_command(session, run["id"], "stop", "somebody", 10)

    threading.Timer(0.5, stop).start()
    begun = time.monotonic()
    assert client.wait(run["id"], timeout_s=30)["state"] == "stopped"
    assert time.monotonic() - begun < 10


def test_faults_arrive_with_their_pointers(client: Client, spec: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        client.submit({**spec, "iterations": 0, "kl": {"coeff": 1}})
    error = caught.value
    assert (error.status, error.code) == (422, "bad_spec")
    assert {fault["pointer"] for fault in error.errors} == {"/iterations", "/kl/coeff"}
    assert "/kl/coeff: unknown field" in str(error)
    with pytest.raises(RequestError, match="line 1"):
        client.submit("name: [")


def test_an_idempotency_key_of_ones_own_makes_one_run(client: Client, spec: dict[str, Any]) -> None:
    assert client.submit(spec, idempotency_key="k")["id"] == client.submit(spec, idempotency_key="k")["id"]
    assert client.submit(spec)["id"] != client.submit(spec)["id"]


def test_refusals_have_their_kinds(client: Client, spec: dict[str, Any], settings: ApiSettings) -> None:
    with pytest.raises(NotFoundError):
        client.run("r-none/../x?y#z")
    run = client.submit(spec)
    client.stop(run["id"])
    with pytest.raises(RefusedError, match="from a client has already stopped at iteration 0") as caught:
        client.stop(run["id"])
    assert caught.value.status == 409
    assert caught.value.allowed == ["queued"]
    url = str(client._connection.http.base_url)
    with Client(url, "ppo_wrong") as stranger, pytest.raises(AccessError):
        stranger.me()


def test_what_a_run_leaves_can_be_read(client: Client, spec: dict[str, Any], sessions: sessionmaker[Session]) -> None:
    run = client.submit(spec)
    with sessions.begin() as session:
        for index in range(num_samples := PAGE + 1):
            session.add(
                Sample(
                    run_id=run["id"], segment=1, iteration=1, kind="train", index=index, prompt="p", response="r",
                    score=None, length=1, finish_reason="stop", tokens={"ids": [1], "texts": ["r"]},
                )
            )  # fmt: skip
    samples = list(client.samples(run["id"]))
    assert len(samples) == num_samples
    assert client.sample_tokens(samples[0]["id"])["ids"] == [1]
    assert not list(client.samples(run["id"], kind="held_out"))
    assert client.checkpoints(run["id"]) == []
    assert client.metrics(run["id"])["latest"] == []
    assert client.query([run["id"]], ["kl/coef"]) == {"series": [], "cursors": {run["id"]: 1}}
    assert client.logs(run["id"])["text"] == ""
    assert client.workers() == []
    assert client.presets() == []
    assert client.spec_schema()["title"] == "RunSpec"
    assert client.registry()


def test_an_address_without_a_platform_is_unreachable() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with Client(url, "ppo_x") as client, pytest.raises(UnreachableError, match="no answer from"):
        client.me()


def test_address_and_key_come_from_the_environment_or_a_local_platforms_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PPO_URL", "PPO_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PPO_HOME", str(tmp_path))
    (tmp_path / "client.json").write_text(json.dumps({"url": "http://127.0.0.1:9", "key": "ppo_file"}))
    with ppo.Client() as client:
        assert str(client._connection.http.base_url).startswith("http://127.0.0.1:9")
        assert client._connection.http.headers["authorization"] == "Bearer ppo_file"


@pytest.mark.stack
def test_following_sits_out_a_killed_service(
    database_url: str, sessions: sessionmaker[Session], key: str, spec: dict[str, Any], tmp_path: Path
) -> None:
    server = ServerProcess(database_url, tmp_path)
    try:
        with Client(server.url, key) as client:
            run_id = client.submit(spec)["id"]

            def write() -> None:
                for number in range(60):
                    with sessions.begin() as session:
                        append_event(session, run_id, "metrics", {"kl/coef": number}, segment=1, iteration=number)
                    time.sleep(0.05)
                with sessions.begin() as session:
                    request_command(session, run_id, "stop", "somebody", 10)

            def kill() -> None:
                time.sleep(1)
                server.kill()
                time.sleep(0.5)
                server.start()

            threads = [threading.Thread(target=write), threading.Thread(target=kill)]
            for thread in threads:
                thread.start()
            seen = [event["seq"] for event in client.follow(run_id)]
            for thread in threads:
                thread.join()
            assert seen == list(range(1, client.run(run_id)["event_seq"] + 1))
    finally:
        server.close()


def test_the_types_of_answers_are_those_of_the_service(settings: ApiSettings) -> None:
    schemas = create_app(settings).openapi()["components"]["schemas"]
    compared = 0
    for name, kind in vars(wire).items():
        if isinstance(kind, type) and hasattr(kind, "__total__"):
            assert set(get_type_hints(kind)) == set(schemas[name]["properties"]), name
            compared += 1
    assert compared >= 15
    assert set(wire.State.__args__) == set(states.STATES)  # type: ignore[attr-defined]
    assert wire.TERMINAL == states.TERMINAL


def test_importing_the_client_loads_neither_torch_nor_the_service() -> None:
    import subprocess
    import sys

    code = (
        "import sys, ppo\n"
        "heavy = {'torch', 'transformers', 'numpy', 'fastapi', 'sqlalchemy', 'celery', 'api', 'worker', 'store'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
