"""Postgres or the broker away: training goes on, and everything is there afterwards, once."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import redis
from celery import Celery

from store.hint import HINT_QUEUE, HINT_TASK
from store.migrate import migrate
from store.session import psycopg_url
from store.states import TERMINAL
from tests.real_postgres import RealPostgres
from tests.real_redis import RealRedis
from tests.worker.platform import LEASE_S, Platform
from worker.loop import START_ALLOWANCE_S

pytestmark = pytest.mark.stack


@pytest.fixture
def platform(database_url: str, tmp_path: Path) -> Iterator[Platform]:
    with Platform(database_url, tmp_path) as platform:
        yield platform


@pytest.fixture
def on_own_postgres(own_postgres: RealPostgres, tmp_path: Path) -> Iterator[Platform]:
    url = own_postgres.create_database()
    migrate(url)
    with Platform(url, tmp_path) as platform:
        yield platform


def test_run_that_ends_while_postgres_is_away_is_written_down_later(
    own_postgres: RealPostgres, on_own_postgres: Platform
) -> None:
    platform = on_own_postgres
    platform.start("worker.loop")
    run_id = platform.submit(20, iteration_s=0.1)
    platform.wait(run_id, lambda run: run.iteration >= 2)
    own_postgres.stop("immediate")
    deadline = time.monotonic() + 30
    while "end-0" not in [what for *_, what in platform.witnessed(run_id)]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    own_postgres.start()
    assert platform.wait_state(run_id, *TERMINAL).state == "succeeded"
    assert platform.stored_metrics(run_id) == platform.journal_metrics(run_id)


def test_a_server_without_a_connection_left_costs_a_starting_run_no_attempt(on_own_postgres: Platform) -> None:
    platform = on_own_postgres
    for module in ("worker.loop", "worker.reconcile"):
        platform.start(module)
    assert platform.wait_state(platform.submit(5), *TERMINAL).state == "succeeded"
    others = []
    with contextlib.suppress(psycopg.OperationalError):
        while True:
            others.append(psycopg.connect(psycopg_url(platform.database_url).replace("+psycopg", "")))
    run_id = platform.submit(5)
    platform.wait_state(run_id, "starting")
    time.sleep(LEASE_S + START_ALLOWANCE_S + 3)
    assert platform.states(run_id) == ["queued", "starting"]
    for connection in others:
        connection.close()
    run = platform.wait_state(run_id, *TERMINAL)
    assert (run.state, run.attempt) == ("succeeded", 1)


@pytest.fixture
def celery_worker(platform: Platform, redis_url: str) -> subprocess.Popen[bytes]:
    return platform.start("worker.app", REDIS_URL=redis_url, PPO_POLL_S="60")


def _hint(redis_url: str, run_id: str) -> None:
    with Celery(broker=redis_url) as sender:
        sender.send_task(HINT_TASK, queue=HINT_QUEUE, args=[run_id], ignore_result=True)


def test_hint_starts_the_run_and_a_doubled_one_changes_nothing(
    platform: Platform, celery_worker: subprocess.Popen[bytes], redis_url: str
) -> None:
    """The worker looks by itself only once a minute here."""
    time.sleep(5)  # past its first look
    run_id = platform.submit(5)
    for _ in range(3):
        _hint(redis_url, run_id)
    run = platform.wait_state(run_id, *TERMINAL, timeout_s=20)
    _hint(redis_url, run_id)
    time.sleep(1)
    assert (run.state, platform.run(run_id).attempt) == ("succeeded", 1)
    assert [what for *_, what in platform.witnessed(run_id)].count("start") == 1


def test_message_that_is_no_hint_does_no_harm(
    platform: Platform, celery_worker: subprocess.Popen[bytes], redis_url: str
) -> None:
    canary = platform.data / "canary"
    with Celery(broker=redis_url) as sender:
        sender.send_task(HINT_TASK, queue=HINT_QUEUE, args=[{"odd": [canary.name]}, 2, 3], ignore_result=True)
        sender.send_task("os.system", queue=HINT_QUEUE, args=[f"touch {canary}"], ignore_result=True)
        sender.conf.update(task_serializer="pickle", accept_content=["pickle"])
        sender.send_task(HINT_TASK, queue=HINT_QUEUE, args=[Path(canary)], serializer="pickle", ignore_result=True)
    time.sleep(5)
    run_id = platform.submit(5)
    _hint(redis_url, run_id)
    assert platform.wait_state(run_id, *TERMINAL, timeout_s=20).state == "succeeded"
    assert not canary.exists()


def test_worker_finds_runs_with_no_broker_to_be_reached(platform: Platform, tmp_path: Path) -> None:
    platform.start("worker.app", REDIS_URL=f"redis+socket://{tmp_path}/nothing.sock")
    assert platform.wait_state(platform.submit(5), *TERMINAL).state == "succeeded"


def test_a_broker_that_takes_nothing_ends_neither_worker_nor_runs(platform: Platform) -> None:
    """A full Redis answers, and refuses every write: to the worker that is there, and to one that starts."""
    with RealRedis() as broker, redis.Redis(unix_socket_path=str(broker.socket)) as client:
        first = platform.start("worker.app", REDIS_URL=broker.url, PPO_CPU_SLOTS="2")
        long = platform.submit(10_000, iteration_s=0.1)
        platform.wait(long, lambda run: run.iteration >= 1)
        client.config_set("maxmemory", "1")
        client.config_set("maxmemory-policy", "noeviction")
        with pytest.raises(redis.ResponseError):
            client.set("any", "thing")
        assert platform.wait_state(platform.submit(5), *TERMINAL).state == "succeeded"
        first.kill()
        second = platform.start("worker.app", REDIS_URL=broker.url, PPO_CPU_SLOTS="2")
        assert platform.wait_state(platform.submit(5), *TERMINAL).state == "succeeded"
        assert second.poll() is None
        assert platform.states(long) == ["queued", "starting", "running"]


def test_data_folder_that_cannot_be_written_is_refused(platform: Platform) -> None:
    (platform.data / "file").write_text("no folder")
    environment = platform.environment(PPO_DATA_DIR=str(platform.data / "file"))
    command = [sys.executable, "-m", "worker.loop"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 1
    assert "cannot be written" in ended.stderr
