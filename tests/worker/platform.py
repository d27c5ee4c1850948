"""Worker and reconciler as real processes on a database and a data folder of the test's own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

from ppo_core.rundir import Event, SegmentDir, read_journal, segment_dir, segments
from store.commands import request_command
from store.ids import new_id
from store.models import Command, MetricDef, MetricPoint, Run, RunEvent, WorkerSlot
from store.runs import create_run
from store.session import AWAY, make_engine, session_factory
from worker.processes import marked_processes

TRAINER = f"{sys.executable} {Path(__file__).with_name('scripted_trainer.py')}"
LEASE_S = 2.0


@dataclass
class Platform:
    """`with Platform(url, folder) as platform`: everything started from it is ended with it."""

    database_url: str
    data: Path
    settings: dict[str, str] = field(default_factory=dict)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    run_ids: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine = make_engine(self.database_url)
        self.sessions: sessionmaker[Session] = session_factory(self.engine)
        self.witness_file = self.data / "witness"

    def __enter__(self) -> Platform:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for run_id in self.run_ids:
            for process_left in marked_processes(run_id, 10**6):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process_left.pid, signal.SIGKILL)
        self.engine.dispose()

    # Processes

    def environment(self, **more: str) -> dict[str, str]:
        return {
            **os.environ,
            "DATABASE_URL": self.database_url,
            "PPO_DATA_DIR": str(self.data),
            "PPO_WORKER_ID": "here",
            "PPO_LEASE_S": str(LEASE_S),
            "PPO_RENEW_S": "0.5",
            "PPO_POLL_S": "0.3",
            "PPO_TRAINER_COMMAND": TRAINER,
            "PPO_WITNESS": str(self.witness_file),
            **self.settings,
            **more,
        }

    def start(self, module: str = "worker.loop", **more: str) -> subprocess.Popen[bytes]:
        with (self.data / f"{module}.log").open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module], env=self.environment(**more), stdout=output, stderr=output
            )
        self.processes.append(process)
        return process

    # Runs

    def submit(self, iterations: int = 10, *, ranks: int = 1, priority: int = 0, gpus: int = 0, **knobs: Any) -> str:
        spec = {"iterations": iterations, "training": {"ranks": ranks}, "scripted": knobs}
        return self.submit_spec(spec, priority=priority, gpus=gpus)

    def submit_spec(self, spec: dict[str, Any], *, priority: int = 0, gpus: int = 0, run_id: str | None = None) -> str:
        run_id = run_id or new_id("r")
        with self.sessions.begin() as session:
            create_run(
                session,
                run_id=run_id,
                name="scripted",
                spec=spec,
                num_iterations=spec["iterations"],
                priority=priority,
                gpus=gpus,
                created_by="test",
            )
        self.run_ids.append(run_id)
        return run_id

    def stop(self, run_id: str, deadline_s: float = 30) -> str:
        with self.sessions.begin() as session:
            return request_command(session, run_id, "stop", "test", deadline_s).id

    def run(self, run_id: str) -> Run:
        with self.sessions() as session:
            return session.get_one(Run, run_id)

    def command(self, command_id: str) -> Command:
        with self.sessions() as session:
            return session.get_one(Command, command_id)

    def wait(self, run_id: str, wanted: Callable[[Run], bool], timeout_s: float = 60) -> Run:
        deadline = time.monotonic() + timeout_s
        run = None
        while time.monotonic() < deadline:
            with contextlib.suppress(*AWAY):
                run = self.run(run_id)
                if wanted(run):
                    return run
            time.sleep(0.05)
        assert run is not None
        raise AssertionError(
            f"after {timeout_s} s the run is {run.state} ({run.reason_code}: {run.reason_detail}), phase {run.phase}, "
            f"iteration {run.iteration}, attempt {run.attempt}\n{self.logs(run_id)}"
        )

    def wait_state(self, run_id: str, *states: str, timeout_s: float = 60) -> Run:
        return self.wait(run_id, lambda run: run.state in states, timeout_s)

    # What is to be seen from outside

    def logs(self, run_id: str) -> str:
        files = [*self.data.glob("*.log"), *(self.data / "runs" / run_id).rglob("*.log")]
        return "\n".join(f"== {file}\n{file.read_text()[-3000:]}" for file in files)

    def witnessed(self, run_id: str) -> Iterator[tuple[int, int, int, int, str]]:
        """(segment, attempt, iteration, pid, what) of each line that this run's trainers left."""
        for line in self.witness_file.read_text().splitlines() if self.witness_file.exists() else ():
            run, segment, attempt, _, iteration, pid, what, _ = line.split()
            if run == run_id:
                yield int(segment), int(attempt), int(iteration), int(pid), what

    def attempts_seen(self, run_id: str) -> dict[int, list[tuple[float, str]]]:
        """(time, what) of each line by lease token; times are the machine's monotonic ones."""
        seen: dict[int, list[tuple[float, str]]] = {}
        for line in self.witness_file.read_text().splitlines() if self.witness_file.exists() else ():
            run, _, _, token, _, _, what, at = line.split()
            if run == run_id:
                seen.setdefault(int(token), []).append((float(at), what))
        return seen

    def held(self, run_id: str) -> bool:
        """Whether its trainer stays in the phase that it was told to."""
        return any(what.startswith("held-") for *_, what in self.witnessed(run_id))

    def release(self, run_id: str) -> None:
        """Let a held trainer go on."""
        Path(f"{self.witness_file}.{run_id}.go").touch()

    def trainer_pid(self, run_id: str, rank: int = 0) -> int:
        start = f"start-{rank}" if rank else "start"
        return [pid for *_, pid, what in self.witnessed(run_id) if what == start][-1]

    def segment(self, run_id: str, number: int = 1) -> SegmentDir:
        return segment_dir(self.data / "runs" / run_id, number)

    def journal(self, run_id: str) -> Iterator[tuple[int, Event]]:
        for number, folder in enumerate(segments(self.data / "runs" / run_id), start=1):
            events, _ = read_journal(folder.journal, max_bytes=2**30)
            yield from ((number, event) for event in events)

    def journal_metrics(self, run_id: str) -> dict[tuple[int, int, str], str]:
        return {
            (segment, event.iteration, name): repr(value)
            for segment, event in self.journal(run_id)
            if event.type == "metrics"
            for name, value in event.payload.items()
        }

    def stored_metrics(self, run_id: str) -> dict[tuple[int, int, str], str]:
        statement = (
            select(MetricPoint.segment, MetricPoint.iteration, MetricDef.name, MetricPoint.value)
            .join(MetricDef, MetricDef.id == MetricPoint.metric_id)
            .where(MetricPoint.run_id == run_id)
        )
        with self.sessions() as session:
            return {(s, i, name): repr(value) for s, i, name, value in session.execute(statement)}

    def states(self, run_id: str) -> list[str]:
        with self.sessions() as session:
            payloads = session.scalars(
                select(RunEvent.payload)
                .where(RunEvent.run_id == run_id, RunEvent.type == "state")
                .order_by(RunEvent.seq)
            )
            return [payload["to"] for payload in payloads]

    def busy_slots(self) -> int:
        with self.sessions() as session:
            return len(session.scalars(select(WorkerSlot.index).where(WorkerSlot.run_id.is_not(None))).all())

    def supervisor_pid(self, run_id: str) -> int:
        pid = self.wait(run_id, lambda run: run.supervisor_pid is not None).supervisor_pid
        assert pid is not None
        return pid


def process_state(pid: int) -> str | None:
    """The kernel's letter for it (R runs, S sleeps, T is stopped, Z is dead); None where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return None


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    return process_state(pid) not in (None, "Z")


def wait_until(check: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def scripted(**knobs: Any) -> str:
    """Knobs for the environment variable PPO_SCRIPTED."""
    return json.dumps(knobs)
