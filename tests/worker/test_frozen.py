"""Processes that are frozen (SIGSTOP) keep nothing from the others for long, and do no harm when they come back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import text

from store.commands import request_command
from store.session import STILL_S
from store.states import TERMINAL
from store.workers import set_state
from tests.worker.platform import Platform, alive, wait_until

pytestmark = pytest.mark.stack

HOLDER = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objid = 7370002 AND granted"


@pytest.fixture
def platform(database_url: str, tmp_path: Path) -> Iterator[Platform]:
    # Leases longer than the tests: what they see is not what follows from the end of one.
    with Platform(database_url, tmp_path, {"PPO_LEASE_S": "60", "PPO_RENEW_S": "0.5"}) as platform:
        yield platform


@contextmanager
def _frozen_in_a_transaction(platform: Platform, name: str, pid: int) -> Iterator[None]:
    """A process frozen when it has changed a run's row and is about to write of it into the run's history."""
    waits = text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = :name"
        " AND wait_event_type = 'Lock' AND query LIKE 'INSERT INTO events%'"
    )
    with platform.engine.connect() as holder, platform.engine.connect() as seer:
        holder.execute(text("LOCK TABLE events IN SHARE MODE"))
        seer = seer.execution_options(isolation_level="AUTOCOMMIT")
        wait_until(lambda: bool(seer.scalar(waits, {"name": name})), 30)
        os.kill(pid, signal.SIGSTOP)
        holder.rollback()
    yield
    os.kill(pid, signal.SIGCONT)


def test_a_worker_frozen_in_the_middle_of_a_claim_hides_no_run(platform: Platform) -> None:
    run_id = platform.submit(5)
    frozen = platform.start("worker.loop")
    with _frozen_in_a_transaction(platform, "ppo-control", frozen.pid):
        since = time.monotonic()
        platform.start("worker.loop", PPO_WORKER_ID="there")
        run = platform.wait_state(run_id, *TERMINAL)
        assert time.monotonic() - since < STILL_S + 15, "interpreters start in seconds, on a busy machine"
        assert (run.state, run.attempt) == ("succeeded", 1)
        with platform.sessions.begin() as session:
            set_state(session, "there", "draining")
    later = platform.wait_state(platform.submit(5), *TERMINAL)
    assert (later.state, later.lease_token) == ("succeeded", 1), "it came back and works"
    assert frozen.poll() is None


def test_a_kill_is_taken_while_a_frozen_supervisor_holds_the_run(platform: Platform) -> None:
    platform.start("worker.loop")
    run_id = platform.submit(10_000)
    platform.wait(run_id, lambda run: run.iteration >= 1)
    token = platform.run(run_id).lease_token
    with _frozen_in_a_transaction(platform, f"ppo {run_id} {token}", platform.supervisor_pid(run_id)):
        since = time.monotonic()
        with platform.sessions.begin() as session:
            assert request_command(session, run_id, "kill", "ada", 60).status == "pending"
        assert time.monotonic() - since < 2 * STILL_S + 2
        assert platform.run(run_id).state == "killing"
    assert platform.wait_state(run_id, *TERMINAL).state == "cancelled", "it came back and obeyed"
    assert platform.stored_metrics(run_id) == platform.journal_metrics(run_id)


def test_another_reconciler_takes_over_from_a_frozen_one(platform: Platform) -> None:
    platform.settings["PPO_LEASE_S"] = "4"

    def holder() -> int | None:
        with platform.sessions() as session:
            return session.scalar(text(HOLDER))

    platform.start("worker.loop")
    first = platform.start("worker.reconcile")
    wait_until(lambda: holder() is not None, 30)
    held_by_first = holder()
    second = platform.start("worker.reconcile")
    run_id = platform.submit(200, iteration_s=0.05, save_every=10)
    platform.wait(run_id, lambda run: run.iteration >= 12)
    assert holder() == held_by_first
    os.kill(first.pid, signal.SIGSTOP)
    os.kill(platform.supervisor_pid(run_id), signal.SIGKILL)
    since = time.monotonic()
    wait_until(lambda: holder() not in (None, held_by_first), 4 + 10)
    assert platform.wait_state(run_id, *TERMINAL).attempt == 2
    assert time.monotonic() - since < 45
    os.kill(first.pid, signal.SIGCONT)
    wait_until(lambda: "the lock was lost" in (platform.data / "worker.reconcile.log").read_text(), 30)
    os.kill(second.pid, signal.SIGTERM)
    second.wait(30)
    wait_until(lambda: holder() is not None, 30)
    assert alive(first.pid)
