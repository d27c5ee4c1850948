"""The service as a process of its own: killed, told to end, and left without its database while streams are open."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from sqlalchemy.orm import Session, sessionmaker

from store import keys
from store.events import NewEvent, append_event, append_events
from store.ids import new_id
from store.migrate import migrate
from store.models import Run
from store.runs import create_run
from store.session import make_engine, session_factory
from tests.api.live_server import ServerProcess
from tests.api.stream_reader import of, read_messages, stream
from tests.real_postgres import RealPostgres


@pytest.fixture
def own_database(postgres: RealPostgres, database_url: str) -> Iterator[sessionmaker[Session]]:
    engine = make_engine(database_url)
    yield session_factory(engine)
    engine.dispose()


@pytest.fixture
def viewer_headers(own_database: sessionmaker[Session]) -> dict[str, str]:
    with own_database.begin() as session:
        return {"Authorization": f"Bearer {keys.create_key(session, 'v', 'viewer')[1]}"}


def new_run(sessions: sessionmaker[Session]) -> str:
    run_id = new_id("r")
    with sessions.begin() as session:
        create_run(session, run_id=run_id, name="x", spec={}, num_iterations=1, priority=0, gpus=0, created_by=None)
    return run_id


@pytest.mark.stack
def test_killing_the_service_mid_stream_loses_and_repeats_nothing(
    own_database: sessionmaker[Session], database_url: str, viewer_headers: dict[str, str], tmp_path: Path
) -> None:
    """Events are written all the while; the service is killed three times; the reader goes on by its last id."""
    sessions = own_database
    run_id = new_run(sessions)
    server = ServerProcess(database_url, tmp_path)
    seen: list[int] = []
    last: str | None = None
    total = 300
    written = threading.Event()

    def write() -> None:
        random.seed(1)
        for number in range(total - 1):
            with sessions.begin() as session:
                append_event(session, run_id, "metrics", {"kl/coef": number}, segment=1, iteration=number)
            time.sleep(random.uniform(0, 0.04))
        written.set()

    def kill_now_and_then() -> None:
        for _ in range(3):
            time.sleep(1.0)
            server.kill()
            server.start()

    writer, killer = threading.Thread(target=write), threading.Thread(target=kill_now_and_then)
    num_connections = 0
    deadline = time.monotonic() + 90
    try:
        writer.start()
        killer.start()
        while not seen or seen[-1] < total:
            assert time.monotonic() < deadline, f"only {len(seen)} of {total} events"
            headers = {**viewer_headers, **({"Last-Event-ID": last} if last else {})}
            with (
                contextlib.suppress(httpx.TransportError),
                httpx.Client(timeout=5, trust_env=False) as http,
                http.stream("GET", f"{server.url}/v1/stream", params={"runs": f"{run_id}:0"}, headers=headers) as reply,
            ):
                num_connections += 1
                for message in read_messages(reply):
                    last = message.id or last
                    if message.event == "run":
                        seen.append(message.data["seq"])
                        if seen[-1] >= total:
                            break
            time.sleep(0.05)
    finally:
        writer.join()
        killer.join()
        server.close()
    assert num_connections > 1
    assert seen == list(range(1, total + 1))
    with sessions() as session:
        assert session.get_one(Run, run_id).event_seq == total


@pytest.mark.stack
def test_sigterm_lets_requests_finish_and_ends_within_ten_seconds(
    own_database: sessionmaker[Session], database_url: str, viewer_headers: dict[str, str], tmp_path: Path
) -> None:
    run_id = new_run(own_database)
    server = ServerProcess(database_url, tmp_path)
    try:
        with (
            httpx.Client(base_url=server.url, headers=viewer_headers, timeout=20, trust_env=False) as http,
            contextlib.ExitStack() as stack,
            ThreadPoolExecutor(1) as threads,
        ):
            opened = [stack.enter_context(stream(http, f"{run_id}:0")) for _ in range(5)]
            for messages in opened:
                next(messages)
            params = {"after": 1, "wait": 2}
            poll = threads.submit(http.get, f"/v1/runs/{run_id}/events", params=params)
            time.sleep(0.3)
            begun = time.monotonic()
            os.kill(server.process.pid, signal.SIGTERM)
            assert server.process.wait(10) == 0
            assert time.monotonic() - begun < 10
            assert poll.result().status_code == 200
            for messages in opened:
                assert [message.event for message in messages][-1] == "bye"
    finally:
        server.close()


@pytest.mark.stack
def test_a_restart_of_postgres_is_survived(own_postgres: RealPostgres, tmp_path: Path) -> None:
    """While it is down: 503, never 500. Afterwards the open stream goes on without a gap."""
    url = own_postgres.create_database()
    migrate(url)
    engine = make_engine(url)
    sessions = session_factory(engine)
    run_id = new_run(sessions)
    with sessions.begin() as session:
        headers = {"Authorization": f"Bearer {keys.create_key(session, 'v', 'viewer')[1]}"}
    server = ServerProcess(url, tmp_path)
    try:
        with (
            httpx.Client(base_url=server.url, headers=headers, timeout=20, trust_env=False) as http,
            stream(http, f"{run_id}:0") as messages,
        ):
            found = of(messages, "run", "resync")
            assert next(found).data["seq"] == 1
            own_postgres.stop()
            assert http.get("/healthz").status_code == 200
            answer = http.get("/v1/runs")
            assert answer.status_code == 503
            assert answer.headers["retry-after"]
            time.sleep(1.1)  # What readiness found out is kept for a second.
            ready = http.get("/readyz")
            assert ready.status_code == 503
            assert ready.json()["checks"]["database"] in ("unreachable", "slow")
            own_postgres.start()
            deadline = time.monotonic() + 5
            while http.get("/v1/runs").status_code != 200:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            with sessions.begin() as session:
                append_events(session, run_id, [NewEvent("note", {"level": "info", "message": ""}, 1)] * 3)
            assert [next(found).data["seq"] for _ in range(3)] == [2, 3, 4]
    finally:
        server.close()
        engine.dispose()
