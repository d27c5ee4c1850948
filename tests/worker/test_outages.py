"""Postgres or the broker away: training goes on, and everything is there afterwards, once."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
import redis
from celery import Celery

from store.hint import HINT_QUEUE, HINT_TASK
from store.ids import new_id
from store.migrate import migrate
from store.session import psycopg_url
from store.states import TERMINAL
from tests.real_postgres import RealPostgres
from tests.real_redis import RealRedis
from tests.worker.platform import LEASE_S, Platform, wait_until
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


def test_hints_that_become_visible_again_start_no_second_attempt(platform: Platform, redis_url: str) -> None:
    """P01: somebody took them and acknowledged nothing, so after 5 s the broker hands them out anew, to two workers."""
    run_id = platform.submit(150, iteration_s=0.1)
    for _ in range(3):
        _hint(redis_url, run_id)
    options = {"visibility_timeout": 5}
    with Celery(broker=redis_url) as taker, taker.connection_for_read(transport_options=options) as connection:
        channel = connection.default_channel
        wait_until(lambda: channel.basic_get(HINT_QUEUE) is not None)
        assert [channel.basic_get(HINT_QUEUE) is not None for _ in range(3)] == [True, True, False]
        for name in ("here", "there"):
            platform.start("worker.app", REDIS_URL=redis_url, PPO_WORKER_ID=name)
        platform.wait(run_id, lambda run: run.iteration >= 1)
        time.sleep(options["visibility_timeout"])
        channel.qos.restore_visible(interval=1)
        log = platform.data / "worker.app.log"
        wait_until(lambda: log.read_text().count(f"{HINT_TASK}[") >= 3, 30)
        assert platform.run(run_id).state == "running"
    run = platform.wait_state(run_id, *TERMINAL)
    _hint(redis_url, run_id)
    time.sleep(2)
    assert (run.state, platform.run(run_id).attempt) == ("succeeded", 1)
    assert [what for *_, what in platform.witnessed(run_id)].count("start") == 1


def test_a_run_whose_commit_is_slow_starts_though_its_hint_came_before(
    platform: Platform, celery_worker: subprocess.Popen[bytes], redis_url: str
) -> None:
    """P07: the hints that come before the commit are about nothing that a worker could see."""
    log = platform.data / "worker.app.log"
    wait_until(lambda: " ready." in log.read_text(), 30)
    with platform.engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE FUNCTION wait_4_s() RETURNS trigger LANGUAGE plpgsql AS"
            " 'BEGIN PERFORM pg_sleep(4); RETURN NULL; END'"
        )
        connection.exec_driver_sql(
            "CREATE CONSTRAINT TRIGGER slow_commit AFTER INSERT ON runs DEFERRABLE INITIALLY DEFERRED"
            " FOR EACH ROW EXECUTE FUNCTION wait_4_s()"
        )
    run_id = new_id("r")
    with ThreadPoolExecutor(1) as pool:
        since = time.monotonic()
        committed = pool.submit(platform.submit_spec, {"iterations": 5}, run_id=run_id)
        for _ in range(2):
            _hint(redis_url, run_id)
        wait_until(lambda: log.read_text().count(f"{HINT_TASK}[") >= 2, 3.5)
        assert not committed.done()
        committed.result()
        assert time.monotonic() - since >= 4
    _hint(redis_url, run_id)
    run = platform.wait_state(run_id, *TERMINAL, timeout_s=30)
    assert (run.state, run.attempt) == ("succeeded", 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_restarts_of_the_broker_with_and_without_a_run_in_progress(platform: Platform) -> None:
    """P09: after each one a new run starts within 60 s, and the one in progress is not disturbed."""
    with RealRedis() as broker:
        worker = platform.start("worker.app", REDIS_URL=broker.url, PPO_CPU_SLOTS="2")
        in_progress = None
        for round_number in range(10):
            if round_number == 5:
                in_progress = platform.submit(100_000, iteration_s=0.1)
                platform.wait(in_progress, lambda run: run.iteration >= 1)
            broker.kill()
            time.sleep(4)
            broker.start()
            run_id = platform.submit(3)
            _hint(broker.url, run_id)
            platform.wait(run_id, lambda run: run.attempt == 1, timeout_s=60)
            assert platform.wait_state(run_id, *TERMINAL).state == "succeeded"
            assert worker.poll() is None
        assert in_progress is not None
        platform.stop(in_progress)
        run = platform.wait_state(in_progress, *TERMINAL)
        assert (run.state, run.attempt) == ("stopped", 1)


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
