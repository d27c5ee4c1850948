"""The list of faults: each with how it is done, in which phases of a run, and how the run has to end.

A strike is a context: what stands before its `yield` is done while the runs are held in their phases, what stands
after it once they are at rest. It yields the runs that it submitted itself, which count as struck while `queued`.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import text

from tests.faults import small_disk, streams
from tests.faults.checker import Expected
from tests.faults.elsewhere import elsewhere
from tests.faults.stage import Stage, signal_if_there, wait_gone
from tests.worker.platform import wait_until

Strike = Callable[[Stage, Sequence[str]], AbstractContextManager[list[str]]]

PHASES = ("loading", "iteration", "saving")
UNDISTURBED = Expected()
LOST_ONCE = Expected(attempts=(2,), failures=(1,))
DRAINED = Expected(attempts=(2,))
HOUR_S = 3600


@dataclass(frozen=True)
class Fault:
    """One row of the table. Those that strike services are `alone`, the others are tried side by side."""

    name: str
    how: str
    strike: Strike
    expected: Expected = UNDISTURBED
    phases: tuple[str, ...] = PHASES
    alone: bool = False
    knobs: Mapping[str, Any] = field(default_factory=dict)
    iterations: int = 8
    by_phase: Mapping[str, Expected] = field(default_factory=dict)
    real: bool = True  # whether it is tried with the real trainer, too
    deadline_s: float = 60

    def expects(self, phase: str) -> Expected:
        """How a run ends that was struck in this phase."""
        return self.by_phase.get(phase, UNDISTURBED if phase == "queued" else self.expected)


def one_by_one(strike: Callable[[Stage, str], None]) -> Strike:
    """A strike at single runs, which asks for nothing afterwards."""

    @functools.wraps(strike)
    @contextmanager
    def at_all(stage: Stage, run_ids: Sequence[str]) -> Iterator[list[str]]:
        for run_id in run_ids:
            strike(stage, run_id)
        yield []

    return at_all


# Processes of one run


@one_by_one
def kill_trainer(stage: Stage, run_id: str) -> None:
    os.kill(stage.trainer_pid(run_id), signal.SIGKILL)


@one_by_one
def kill_supervisor(stage: Stage, run_id: str) -> None:
    trainer = stage.trainer_pid(run_id)
    os.kill(stage.platform.supervisor_pid(run_id), signal.SIGKILL)
    wait_gone(trainer)  # by the kernel's word, whatever it was doing


@one_by_one
def kill_all(stage: Stage, run_id: str) -> None:
    stage.kill_all_of(run_id)


@one_by_one
def freeze_trainer(stage: Stage, run_id: str) -> None:
    trainer = stage.trainer_pid(run_id)
    os.kill(trainer, signal.SIGSTOP)
    stage.platform.wait(run_id, lambda run: run.attempt == 2)
    signal_if_there(trainer, signal.SIGCONT)


@one_by_one
def freeze_trainer_a_moment(stage: Stage, run_id: str) -> None:
    trainer = stage.trainer_pid(run_id)
    os.kill(trainer, signal.SIGSTOP)
    time.sleep(stage.lease_s + 1)
    os.kill(trainer, signal.SIGCONT)


@one_by_one
def freeze_supervisor(stage: Stage, run_id: str) -> None:
    supervisor = stage.platform.supervisor_pid(run_id)
    os.kill(supervisor, signal.SIGSTOP)
    stage.platform.wait(run_id, lambda run: run.attempt == 2)
    signal_if_there(supervisor, signal.SIGCONT)


@one_by_one
def double_the_hint(stage: Stage, run_id: str) -> None:
    for _ in range(3):
        stage.hint(run_id)


# Services


@contextmanager
def cut_off_supervisor(stage: Stage, run_ids: Sequence[str]) -> Iterator[list[str]]:
    """It is frozen, and nobody can end it: worker and reconciler are on another machine, as far as they can see."""
    supervisors = [stage.platform.supervisor_pid(run_id) for run_id in run_ids]
    stage.kill(stage.worker)
    stage.kill(stage.reconciler)
    for supervisor in supervisors:
        os.kill(supervisor, signal.SIGSTOP)
    with elsewhere(stage):
        for run_id in run_ids:
            stage.platform.wait(run_id, lambda run: run.attempt == 2 and run.state != "starting", 90)
            stage.platform.release(run_id)
        for run_id in run_ids:
            if stage.phase_of.get(run_id) == "iteration":  # its trainer, not frozen, is to reach its goal before
                wait_until(functools.partial(_told_its_end, stage, run_id), 60)
        for supervisor in supervisors:
            os.kill(supervisor, signal.SIGCONT)
        yield []
    stage.start_worker()
    stage.start_reconciler()


def _told_its_end(stage: Stage, run_id: str) -> bool:
    return any(segment == 1 and event.type == "end" for segment, event in stage.platform.journal(run_id))


@contextmanager
def kill_worker(stage: Stage, run_ids: Sequence[str]) -> Iterator[list[str]]:
    stage.kill(stage.worker)
    stage.release(*run_ids)
    queued = stage.submit()
    time.sleep(1)
    stage.start_worker()
    yield [queued]


@contextmanager
def drain_worker(stage: Stage, run_ids: Sequence[str]) -> Iterator[list[str]]:
    stage.worker.send_signal(signal.SIGTERM)
    for run_id in run_ids:  # or they would reach their goal before it has reached them
        stage.platform.wait(run_id, lambda run: run.state not in ("starting", "running"))
        stage.release(run_id)
    assert stage.worker.wait(60) == 0
    queued = stage.submit()
    stage.start_worker()
    yield [queued]


@contextmanager
def lose_machine(stage: Stage, run_ids: Sequence[str]) -> Iterator[list[str]]:
    stage.kill(stage.worker)
    stage.kill_all_of(*run_ids)
    stage.start_worker()
    yield []


@contextmanager
def kill_reconciler(stage: Stage, run_ids: Sequence[str]) -> Iterator[list[str]]:
    """The supervisors, too: else there would be nothing for it to do."""
    stage.kill(stage.reconciler)
    for run_id in run_ids:
        os.kill(stage.platform.supervisor_pid(run_id), signal.SIGKILL)
    time.sleep(stage.lease_s)
    stage.start_reconciler()
    yield []


@contextmanager
def restart_redis(stage: Stage, run_ids: Sequence[str]) -> Iterator[list[str]]:
    stage.redis.kill()
    stage.release(*run_ids)
    time.sleep(2)
    stage.redis.start()
    queued = stage.submit()
    stage.hint(queued)
    yield [queued]


@contextmanager
def flush_redis(stage: Stage, run_ids: Sequence[str]) -> Iterator[list[str]]:
    queued = [stage.submit() for _ in range(2)]
    for run_id in queued:
        stage.hint(run_id)
    stage.redis.flush()
    yield queued


@contextmanager
def be_without_redis(stage: Stage, run_ids: Sequence[str]) -> Iterator[list[str]]:
    stage.redis.kill()
    yield [stage.submit()]
    stage.redis.start()


@contextmanager
def restart_postgres(stage: Stage, run_ids: Sequence[str]) -> Iterator[list[str]]:
    stage.postgres.stop("immediate")
    stage.postgres.start()
    yield [stage.submit()]


def stay_without_postgres(seconds: float) -> Strike:
    """Postgres is away for so long; training goes on all the while."""

    @contextmanager
    def away(stage: Stage, run_ids: Sequence[str]) -> Iterator[list[str]]:
        stage.postgres.stop("immediate")
        stage.release(*run_ids)
        until = time.monotonic() + seconds
        try:
            for _ in range(3):  # looked at three times, so that a pause at any time of it is seen
                before = {run_id: stage.iterations_done(run_id) for run_id in run_ids}
                time.sleep(max(0.0, until - time.monotonic()) if _ == 2 else seconds / 3)
                paused = [run_id for run_id, done in before.items() if stage.iterations_done(run_id) <= done]
                assert not paused, f"training of {paused} paused while the database was away"
        finally:
            stage.postgres.start()
        yield []

    return away


@contextmanager
def race_two_workers(stage: Stage, run_ids: Sequence[str]) -> Iterator[list[str]]:
    with stage.second_worker():
        queued = [stage.submit(iterations=3) for _ in range(6)]
        for run_id in queued:
            stage.hint(run_id)
        wait_until(lambda: all(stage.platform.run(run_id).attempt for run_id in queued), 60)
        yield queued


@contextmanager
def kill_api(stage: Stage, run_ids: Sequence[str]) -> Iterator[list[str]]:
    with streams.read_over_restarts(stage, run_ids) as kill_and_start:
        stage.release(*run_ids)
        kill_and_start()
        yield []


def move_database_clock(seconds: float) -> Strike:
    """All that was written by the database's clock before looks as it does after a jump of that clock."""

    @contextmanager
    def moved(stage: Stage, run_ids: Sequence[str]) -> Iterator[list[str]]:
        shift = {"seconds": -seconds}
        with stage.platform.sessions.begin() as session:
            for table, column in (
                ("runs", "lease_expires_at"),
                ("runs", "progress_deadline_at"),
                ("runs", "not_before"),
                ("runs", "queued_at"),
                ("workers", "heartbeat_at"),
                ("commands", "deadline_at"),
            ):
                session.execute(
                    text(f"UPDATE {table} SET {column} = {column} + make_interval(secs => :seconds)"), shift
                )
        yield []

    return moved


@contextmanager
def fill_disk(stage: Stage, run_ids: Sequence[str]) -> Iterator[list[str]]:
    for run_id in run_ids:
        small_disk.fill(stage.run_dir(run_id))
        if stage.phase_of[run_id] == "stopping":
            stage.platform.stop(run_id)
    yield []


FULL = Expected("paused", "disk_full")

FAULTS = (
    Fault("trainer-killed", "SIGKILL of the trainer", kill_trainer, LOST_ONCE),
    Fault("supervisor-killed", "SIGKILL of the supervisor; the kernel ends its trainer", kill_supervisor, LOST_ONCE),
    Fault("supervisor-and-trainer-killed", "SIGKILL of every process of the run", kill_all, LOST_ONCE),
    Fault(
        "trainer-frozen",
        "SIGSTOP of the trainer for good, SIGCONT of its number when the run has gone on",
        freeze_trainer,
        LOST_ONCE,
        knobs={"phase_s": 2.0},
        real=False,  # the real one announces half an hour for a phase
        deadline_s=90,
    ),
    Fault("trainer-frozen-a-moment", "SIGSTOP of the trainer for longer than a lease", freeze_trainer_a_moment),
    Fault(
        "supervisor-frozen",
        "SIGSTOP of the supervisor, SIGCONT of its number when the run has gone on",
        freeze_supervisor,
        LOST_ONCE,
    ),
    Fault("hint-doubled", "three hints of a run that goes on (most others here have lost theirs)", double_the_hint),
    Fault(
        "disk-full",
        "the run's disk is filled before a save: of the schedule, of a stop, of the goal",
        fill_disk,
        FULL,
        phases=("saving", "stopping", "finishing"),
        knobs={"checkpoint_bytes": 200_000, "hold": ["iteration", 5]},
        by_phase={"stopping": Expected("stopped", "disk_full")},
        real=False,
    ),
    Fault(
        "supervisor-cut-off",
        "SIGSTOP of the supervisor where nobody can end it, SIGCONT when the run goes on elsewhere",
        cut_off_supervisor,
        Expected(attempts=(2,), failures=(1,), beside=True),
        alone=True,
        deadline_s=120,
    ),
    Fault("worker-killed", "SIGKILL of the Celery parent, started again after 1 s", kill_worker, alone=True),
    Fault(
        "worker-terminated", "SIGTERM of the worker, started again when it has left", drain_worker, DRAINED, alone=True
    ),
    Fault(
        "machine-lost",
        "SIGKILL of the worker, the supervisors and the trainers; the worker is started again",
        lose_machine,
        LOST_ONCE,
        alone=True,
    ),
    Fault(
        "reconciler-killed",
        "SIGKILL of the reconciler and of the supervisors; the reconciler is started again after a lease",
        kill_reconciler,
        LOST_ONCE,
        alone=True,
    ),
    Fault("redis-restarted", "SIGKILL of Redis, started again after 2 s", restart_redis, alone=True),
    Fault("redis-flushed", "FLUSHALL with hints of queued runs in it", flush_redis, alone=True),
    Fault("redis-absent", "no Redis until the runs are at rest", be_without_redis, alone=True),
    Fault("postgres-restarted", "immediate stop of Postgres and start", restart_postgres, alone=True),
    Fault(
        "postgres-away",
        "Postgres stopped for 6 s, longer than a lease; training has to go on",
        stay_without_postgres(6),
        alone=True,
        knobs={"iteration_s": 0.1},
        iterations=90,
        real=False,  # away-60 is
    ),
    Fault(
        "postgres-away-60-s",
        "Postgres stopped for 60 s; training has to go on",
        stay_without_postgres(60),
        alone=True,
        knobs={"iteration_s": 0.2},
        iterations=320,
        deadline_s=180,
    ),
    Fault(
        "two-workers-race",
        "six runs with a hint each, for two workers that have room for all",
        race_two_workers,
        phases=(),
        alone=True,
    ),
    Fault("api-killed", "SIGKILL of the api with a stream open; both come back", kill_api, alone=True),
    Fault(
        "clock-forward",
        "the database's clock and the trainer's jump an hour forward",
        move_database_clock(HOUR_S),
        Expected(attempts=(1, 2), failures=(0, 1)),  # a look between jump and renewal takes the lease for over
        alone=True,
        knobs={"clock_jump": [4, HOUR_S]},
    ),
    Fault(
        "clock-back",
        "the database's clock and the trainer's jump an hour back",
        move_database_clock(-HOUR_S),
        alone=True,
        knobs={"clock_jump": [4, -HOUR_S]},
    ),
)
# What is too long for every run of the tests.
LONG: Collection[str] = ("postgres-away-60-s",)
