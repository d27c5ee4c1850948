"""Draining a worker by request, with real processes: its runs save and go back, and it stays up until enabled."""

from __future__ import annotations

from pathlib import Path

import pytest

from store import workers
from store.models import Worker
from store.run_read import run_standing
from tests.worker.platform import Platform, wait_until

pytestmark = pytest.mark.stack


def test_a_drained_worker_puts_its_runs_back_and_goes_on_when_it_is_enabled(database_url: str, tmp_path: Path) -> None:
    with Platform(database_url, tmp_path, {"PPO_CPU_SLOTS": "2"}) as platform:
        process = platform.start()
        runs = [platform.submit(10_000, iteration_s=0.1), platform.submit(10_000, iteration_s=0.1)]
        for run_id in runs:
            platform.wait(run_id, lambda run: run.iteration >= 2)
        with platform.sessions.begin() as session:
            workers.ask_drain(session, "here", "ada")
        for run_id in runs:
            run = platform.wait_state(run_id, "queued")
            assert (run.reason_code, run.infrastructure_failures, run.attempt) == ("drained", 0, 1)
            assert platform.states(run_id)[-2:] == ["stopping", "queued"]
        assert platform.busy_slots() == 0
        with platform.sessions() as session:
            standing = run_standing(session, runs[0])
            assert standing is not None
            assert standing.waiting_reason == "Worker here is draining."
            seen = session.get_one(Worker, "here").heartbeat_at

        def heard_again() -> bool:
            with platform.sessions() as session:
                worker = session.get_one(Worker, "here")
                return worker.state == "draining" and worker.heartbeat_at > seen

        wait_until(heard_again, 60)  # it lives on, and leaves the runs where they are
        assert process.poll() is None
        assert [platform.run(run_id).state for run_id in runs] == ["queued", "queued"]
        with platform.sessions.begin() as session:
            workers.enable(session, "here")
        for run_id in runs:
            run = platform.wait(run_id, lambda run: run.state == "running" and run.attempt == 2)
            assert run.active_segment == 1, "it went on from the checkpoint that it saved"
