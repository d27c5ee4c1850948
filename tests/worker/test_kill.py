"""A kill always ends a run, whoever is deaf or dead; a pause or checkpoint that comes too late is taken back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppo_core.rundir import read_commands
from store.commands import request_command
from store.states import TERMINAL
from tests.worker.conftest import Claimed
from tests.worker.platform import Platform, alive, wait_until
from worker.processes import marked_processes

pytestmark = pytest.mark.stack


@pytest.fixture
def worker(database_url: str, tmp_path: Path) -> Iterator[Platform]:
    with Platform(database_url, tmp_path, {"PPO_CPU_SLOTS": "3"}) as platform:
        platform.start("worker.loop")
        yield platform


def _ask(platform: Platform, run_id: str, kind: str, deadline_s: float = 60) -> str:
    with platform.sessions.begin() as session:
        return request_command(session, run_id, kind, "ada", deadline_s).id


def _cancelled(platform: Platform, run_id: str, kill_id: str) -> None:
    """What holds after every kill: the run is cancelled, its command done, no process and no slot left."""
    run = platform.wait_state(run_id, *TERMINAL)
    assert (run.state, run.reason_code) == ("cancelled", "killed")
    assert "killed by ada; what it had not saved is lost" in str(run.reason_detail)
    command = platform.command(kill_id)
    assert (command.kind, command.status, command.detail) == ("kill", "done", "every process of the run is gone")
    wait_until(lambda: not marked_processes(run_id, 10**6), 60)  # the supervisor itself is just leaving
    with platform.sessions() as session:
        assert all(other.finished_at for other in session.query(type(command)).filter_by(run_id=run_id))
    assert platform.stored_metrics(run_id) == platform.journal_metrics(run_id)


def test_kill_ends_a_deaf_tree_a_loading_trainer_and_a_stop_under_way(worker: Platform) -> None:
    """The first trainer is deaf to everything, one of its children has left the session, and it is stopping already."""
    deaf = worker.submit(10_000, ignore_stop=True, children=3)
    loading = worker.submit(10, loading_s=300)
    worker.wait(deaf, lambda run: run.iteration >= 1)
    worker.wait(loading, lambda run: run.phase == "loading")
    stop = _ask(worker, deaf, "stop", 300)
    asked = time.monotonic()
    kills = {run_id: _ask(worker, run_id, "kill") for run_id in (deaf, loading)}
    assert {run_id: _ask(worker, run_id, "kill") for run_id in kills} == kills  # twice is the same command
    for run_id, kill in kills.items():
        assert worker.run(run_id).state in ("killing", "cancelled")
        _cancelled(worker, run_id, kill)
        assert worker.command(kill).acked_at is not None
    assert time.monotonic() - asked < 60  # its deadline; it takes two seconds
    assert worker.states(deaf)[-3:] == ["stopping", "killing", "cancelled"]
    assert worker.command(stop).status == "superseded"
    assert worker.busy_slots() == 0


def test_kill_is_carried_out_by_the_reconciler_where_the_supervisor_is_dead_or_frozen(worker: Platform) -> None:
    worker.start("worker.reconcile")
    runs = {worker.submit(10_000): signal.SIGKILL, worker.submit(10_000): signal.SIGSTOP}
    for run_id in runs:
        worker.wait(run_id, lambda run: run.iteration >= 1)
    kills = {}
    for run_id, blow in runs.items():
        os.kill(worker.supervisor_pid(run_id), blow)
        kills[run_id] = _ask(worker, run_id, "kill")
    for run_id, kill in kills.items():
        _cancelled(worker, run_id, kill)
        # One that held its row was declared lost before the kill could be taken.
        assert worker.states(run_id)[-3:] in (
            ["killing", "recovering", "cancelled"],
            ["running", "recovering", "cancelled"],
        )
        assert not alive(worker.trainer_pid(run_id))
        assert worker.run(run_id).attempt == 1
    assert worker.busy_slots() == 0


def test_a_run_that_was_killed_before_its_supervisor_began_starts_no_trainer(
    claimed: Claimed, database_url: str
) -> None:
    with claimed.sessions.begin() as session:
        kill = request_command(session, claimed.run_id, "kill", "ada", 60).id
    with Platform(database_url, claimed.data) as platform:
        command = [sys.executable, "-m", "worker.supervise", claimed.run_id, str(claimed.token)]
        assert subprocess.run(command, env=platform.environment(), timeout=60).returncode == 0
        _cancelled(platform, claimed.run_id, kill)
        assert not platform.witness_file.exists()


def test_late_pause_and_checkpoint_are_taken_back_and_the_run_goes_on(worker: Platform) -> None:
    run_id = worker.submit(10_000, ignore_stop=True)
    worker.wait(run_id, lambda run: run.iteration >= 1)
    late = [_ask(worker, run_id, kind, 1) for kind in ("checkpoint", "pause")]
    worker.wait_state(run_id, "pausing")
    run = worker.wait_state(run_id, "running")
    assert run.reason_code == "pause_timed_out"
    for command_id in late:
        wait_until(lambda command_id=command_id: worker.command(command_id).finished_at is not None, 60)
        command = worker.command(command_id)
        assert command.status == "timed_out"
        assert "by the deadline; the request was withdrawn and the run goes on" in str(command.detail)
    assert read_commands(worker.segment(run_id), run.lease_token) == []
    assert worker.wait(run_id, lambda now: now.iteration > run.iteration).attempt == 1
    _cancelled(worker, run_id, _ask(worker, run_id, "kill"))
