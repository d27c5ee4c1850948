"""A whole platform to strike at: Postgres, Redis, a Celery worker, a reconciler, and runs held in a phase."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from celery import Celery
from sqlalchemy import select

from store.hint import HINT_QUEUE, HINT_TASK
from store.migrate import migrate
from store.models import Worker
from tests.faults import small_disk
from tests.real_postgres import RealPostgres
from tests.real_redis import RealRedis
from tests.worker.platform import Platform, wait_until
from worker.processes import marked_processes

# Iterations of the scripted runs: checkpoints at 3, 6 and 8, so that a loss in the middle goes back in a new segment.
KNOBS: dict[str, Any] = {"iteration_s": 0.05, "checkpoint_every": 3}
ITERATIONS = 8
HELD_AT = {"loading": 0, "iteration": 5, "saving": 6}
SLOTS = 40
# For platforms that hold scripted and real runs.
EITHER_TRAINER = f"{sys.executable} {Path(__file__).with_name('either_trainer.py')}"
# Longer than elsewhere in the tests: of many runs at once, on a busy machine, none must lose its lease by itself.
LEASE_S = 5.0


@dataclass
class Stage:
    """Services that can be struck and come back, as their service manager would bring them."""

    postgres: RealPostgres
    redis: RealRedis
    platform: Platform
    phase_of: dict[str, str] = field(default_factory=dict)
    worker: subprocess.Popen[bytes] = field(init=False)
    reconciler: subprocess.Popen[bytes] = field(init=False)

    def start_worker(self) -> None:
        self.worker = self.platform.start("worker.app", REDIS_URL=self.redis.url, PPO_CPU_SLOTS=str(SLOTS))

    def start_reconciler(self) -> None:
        self.reconciler = self.platform.start("worker.reconcile")

    def submit(
        self, phase: str | None = None, *, iterations: int = ITERATIONS, run_id: str | None = None, **knobs: Any
    ) -> str:
        """A run that will be held in a phase, or in none; nobody is told of it, so the worker has to look."""
        hold = {"hold": [phase, HELD_AT[phase]]} if phase in HELD_AT else {}
        spec = {"iterations": iterations, "scripted": KNOBS | hold | knobs}
        return self.platform.submit_spec(spec, run_id=run_id)

    def hint(self, run_id: str) -> None:
        with Celery(broker=self.redis.url) as sender:
            sender.send_task(HINT_TASK, queue=HINT_QUEUE, args=[run_id], ignore_result=True)

    @property
    def lease_s(self) -> float:
        return float(self.platform.settings["PPO_LEASE_S"])

    def run_dir(self, run_id: str) -> Path:
        return self.platform.data / "runs" / run_id

    def release(self, *run_ids: str) -> None:
        """Let held trainers go on."""
        for run_id in run_ids:
            self.platform.release(run_id)

    def trainer_pid(self, run_id: str) -> int:
        """The trainer that says in the journal that it started, or the scripted one that is still loading."""
        started = [event.payload["pid"] for _, event in self.platform.journal(run_id) if event.type == "started"]
        return int(started[-1]) if started else self.platform.trainer_pid(run_id)

    def iterations_done(self, run_id: str) -> int:
        """How far the run is, by its journal alone."""
        return max((event.iteration for _, event in self.platform.journal(run_id)), default=0)

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait(10)

    def kill_all_of(self, *run_ids: str) -> None:
        """Every process of these runs, as when their machine goes down."""
        for run_id in run_ids:
            for process in marked_processes(run_id, 10**6):
                signal_if_there(process.pid, signal.SIGKILL)

    @contextmanager
    def second_worker(self) -> Iterator[None]:
        """Another machine's worker beside the first, as long as this lasts."""
        other = self.platform.start("worker.loop", PPO_WORKER_ID="there", PPO_CPU_SLOTS=str(SLOTS))

        def registered() -> bool:
            with self.platform.sessions() as session:
                return session.scalar(select(Worker.state).where(Worker.id == "there")) == "active"

        wait_until(registered, 60)
        yield
        other.send_signal(signal.SIGTERM)
        assert other.wait(60) == 0


def signal_if_there(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def wait_gone(pid: int, timeout_s: float = 30) -> None:
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), timeout_s)


@contextmanager
def whole_stage(folder: Path, **settings: str) -> Iterator[Stage]:
    """Everything up. `settings` are the platform's, over those that tests use."""
    with RealPostgres() as postgres, RealRedis() as redis:
        url = postgres.create_database()
        migrate(url)
        with Platform(url, folder, {"PPO_LEASE_S": str(LEASE_S), "PPO_RENEW_S": "1", **settings}) as platform:
            stage = Stage(postgres, redis, platform)
            stage.start_worker()
            stage.start_reconciler()
            try:
                yield stage
            finally:
                small_disk.take_away(folder)


def wait_held(platform: Platform, run_id: str, timeout_s: float = 120) -> None:
    """Wait until the run's trainer is where it was told to stay."""
    deadline = time.monotonic() + timeout_s
    while not platform.held(run_id):
        assert time.monotonic() < deadline, f"the run did not reach its phase\n{platform.logs(run_id)}"
        time.sleep(0.1)
