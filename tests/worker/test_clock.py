"""Jumps of the database's clock: no attempt is lost by one forward, and no lost run waits for one back to pass."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url

from store.session import psycopg_url
from store.states import TERMINAL
from tests.worker.platform import Platform, wait_until
from worker.clock_watch import ClockWatch

HOUR_S = 3600

# Found before the functions of the same names that are the server's own.
MOVED = """
CREATE SCHEMA moved;
CREATE TABLE moved.clock (shift interval NOT NULL);
INSERT INTO moved.clock VALUES ('0');
CREATE FUNCTION moved.now() RETURNS timestamptz STABLE
    RETURN pg_catalog.now() + (SELECT shift FROM moved.clock);
CREATE FUNCTION moved.clock_timestamp() RETURNS timestamptz VOLATILE
    RETURN pg_catalog.clock_timestamp() + (SELECT shift FROM moved.clock);
"""


class MovedClock:
    """A database whose clock can be moved for all who connect to it from now on."""

    def __init__(self, url: str) -> None:
        self._engine = create_engine(psycopg_url(url), isolation_level="AUTOCOMMIT")
        with self._engine.connect() as connection:
            connection.exec_driver_sql(MOVED)
            name = make_url(url).database
            connection.execute(text(f"ALTER DATABASE {name} SET search_path = moved, pg_catalog, public"))

    def move(self, seconds: float) -> None:
        with self._engine.connect() as connection:
            connection.execute(
                text("UPDATE moved.clock SET shift = shift + make_interval(secs => :seconds)"), {"seconds": seconds}
            )

    def close(self) -> None:
        self._engine.dispose()


@pytest.fixture
def clock(database_url: str) -> Iterator[MovedClock]:
    clock = MovedClock(database_url)
    yield clock
    clock.close()


@pytest.fixture
def platform(clock: MovedClock, database_url: str, tmp_path: Path) -> Iterator[Platform]:
    with Platform(database_url, tmp_path) as platform:
        platform.start("worker.loop")
        platform.start("worker.reconcile")
        yield platform


def _told(platform: Platform, seconds: int) -> bool:
    return f"clock jumped by {seconds} s" in (platform.data / "worker.reconcile.log").read_text()


@pytest.mark.stack
def test_a_clock_that_jumps_an_hour_forward_costs_no_attempt(platform: Platform, clock: MovedClock) -> None:
    run_id = platform.submit(100, iteration_s=0.1)
    platform.wait(run_id, lambda run: run.iteration >= 2)
    clock.move(HOUR_S)
    wait_until(lambda: _told(platform, HOUR_S), 30)
    run = platform.wait_state(run_id, *TERMINAL)
    assert (run.state, run.attempt, run.infrastructure_failures) == ("succeeded", 1, 0)
    assert "recovering" not in platform.states(run_id)


@pytest.mark.stack
def test_a_run_that_is_lost_when_the_clock_jumps_back_does_not_wait_an_hour(
    platform: Platform, clock: MovedClock
) -> None:
    run_id = platform.submit(100, iteration_s=0.1)
    platform.wait(run_id, lambda run: run.iteration >= 2)
    os.kill(platform.supervisor_pid(run_id), signal.SIGKILL)
    clock.move(-HOUR_S)
    run = platform.wait_state(run_id, *TERMINAL)
    assert (run.state, run.attempt) == ("succeeded", 2)
    assert _told(platform, -HOUR_S)


def test_a_clock_that_goes_with_the_machines_did_not_jump() -> None:
    watch = ClockWatch(1.0)
    assert watch.jumped(datetime.now(UTC)) is None, "the first time there is nothing to compare with"
    time.sleep(0.05)
    assert watch.jumped(datetime.now(UTC)) is None
    for seconds in (5, 0):  # there, and back
        jump = watch.jumped(datetime.now(UTC) + timedelta(seconds=seconds))
        assert jump == pytest.approx(5 if seconds else -5, abs=0.9)
        assert watch.jumped(datetime.now(UTC) + timedelta(seconds=seconds)) is None, "told once"
