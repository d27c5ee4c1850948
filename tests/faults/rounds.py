"""Plays faults: runs are brought into their phases, struck, watched until they rest, and given to the checker."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from store.ids import new_id
from tests.faults import small_disk
from tests.faults.checker import Rest, violations, watch
from tests.faults.faults import Fault
from tests.faults.stage import Stage, wait_held
from tests.worker.platform import wait_until

QUEUED = "queued"
# The real trainer loads for longer than the scripted one's whole run, and again after a loss.
REAL_TAKES = 3


@dataclass(frozen=True)
class Outcome:
    """What became of one struck run. `seconds` are from the strike to its rest; no violation is the good outcome."""

    fault: str
    phase: str
    trainer: str  # scripted | real
    state: str
    attempts: int
    seconds: float
    violations: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Struck:
    """A run that was struck, when, and what it is to become."""

    fault: Fault
    phase: str
    run_id: str
    at: datetime


def play_alone(stage: Stage, fault: Fault, phases: Sequence[str]) -> list[Outcome]:
    """One fault of a service, or of several runs at once: runs in these phases are struck in the same moment."""
    run_ids = {phase: _submit(stage, fault, phase) for phase in phases}
    return _strike(stage, [(fault, run_ids)], "scripted")


def play_beside(stage: Stage, cases: Sequence[tuple[Fault, str]]) -> list[Outcome]:
    """Faults of single runs, each in a phase, side by side on one platform."""
    runs = [(fault, {phase: _submit(stage, fault, phase)}) for fault, phase in cases]
    return _strike(stage, runs, "scripted")


def play_real(stage: Stage, fault: Fault, spec: dict[str, Any]) -> list[Outcome]:
    """One fault with one run of the real trainer, struck in the middle of an iteration."""
    run_ids = {"iteration": stage.platform.submit_spec(spec)} if fault.phases else {}
    for run_id in run_ids.values():
        # Between its first checkpoint and its last iterations.
        wait_until(lambda run_id=run_id: stage.iterations_done(run_id) >= 3, 180)  # type: ignore[misc]
    return _strike(stage, [(fault, run_ids)], "real")


def _submit(stage: Stage, fault: Fault, phase: str) -> str:
    knobs = dict(fault.knobs)
    run_id = new_id("r")
    iterations = fault.iterations
    if fault.name == "disk-full":
        knobs |= small_disk.give(stage.run_dir(run_id))
        iterations = 5 if phase == "finishing" else iterations
    stage.phase_of[run_id] = phase
    return stage.submit(phase, iterations=iterations, run_id=run_id, **knobs)


def _strike(stage: Stage, runs: Sequence[tuple[Fault, dict[str, str]]], trainer: str) -> list[Outcome]:
    with ExitStack() as afterwards, ThreadPoolExecutor(len(runs)) as threads:

        def one(fault: Fault, run_ids: dict[str, str]) -> list[_Struck]:
            if trainer == "scripted":
                for run_id in run_ids.values():
                    wait_held(stage.platform, run_id)
            at = datetime.now(UTC)
            context = fault.strike(stage, list(run_ids.values()))
            more = context.__enter__()
            afterwards.push(context)
            stage.release(*run_ids.values())
            return [
                *(_Struck(fault, phase, run_id, at) for phase, run_id in run_ids.items()),
                *(_Struck(fault, QUEUED, run_id, at) for run_id in more),
            ]

        struck = [each for some in threads.map(lambda pair: one(*pair), runs) for each in some]
        now = time.monotonic()
        seen = watch(stage.platform, {each.run_id: now + _deadline_s(each.fault, trainer) for each in struck})
    return list(_judge(stage, struck, seen, trainer))


def _deadline_s(fault: Fault, trainer: str) -> float:
    return fault.deadline_s * (REAL_TAKES if trainer == "real" else 1)


def _judge(stage: Stage, struck: Sequence[_Struck], seen: dict[str, Any], trainer: str) -> Iterator[Outcome]:
    for each in struck:
        found = seen[each.run_id]
        run = found.run if isinstance(found, Rest) else found
        # By the database's clock, which is this machine's: a strike may outlast the run.
        seconds = (run.updated_at - each.at).total_seconds()
        sentences = violations(stage.platform, found, each.fault.expects(each.phase))
        if seconds > (deadline_s := _deadline_s(each.fault, trainer)):
            sentences.append(f"came to rest after {seconds:.0f} s, not within {deadline_s:.0f} s")
        yield Outcome(each.fault.name, each.phase, trainer, run.state, run.attempt, round(seconds, 1), tuple(sentences))
