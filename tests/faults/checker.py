"""What has to hold of a run after any fault: one checker for all of them.

It compares what the database says with what is to be seen without it: the trainers' witness file, the journal, the
checkpoints' files, and the processes that carry the run's mark.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from ppo_core.errors import CheckpointError
from ppo_core.rundir import MANIFEST, verify_checkpoint
from store.commands import open_commands
from store.models import Checkpoint, Run, RunEvent, RunIteration, WorkerSlot
from store.session import AWAY
from store.states import AT_REST, MOVES
from tests.worker.platform import Platform
from tests.worker.strays import strays
from worker.processes import marked_processes

POLL_S = 0.05
# From the outcome's commit to the end of the supervisor that wrote it.
LEAVING_S = 20


@dataclass(frozen=True)
class Expected:
    """How a run has to end. Other attempts of it may be had than the machine's mood decides."""

    state: str = "succeeded"
    reason: str = "goal"
    attempts: Collection[int] = (1,)
    failures: Collection[int] = (0,)
    # Cut off from the others, an old trainer may train on for a while; what it does must not count.
    beside: bool = False

    def __str__(self) -> str:
        numbers = " or ".join(map(str, sorted(self.attempts)))
        return f"{self.state} ({self.reason}) in attempt {numbers}"


@dataclass(frozen=True)
class Rest:
    """A run seen at rest, and which of its processes were still there."""

    run: Run
    strays: list[int]


def watch(platform: Platform, deadlines: Mapping[str, float]) -> dict[str, Rest | Run]:
    """Wait until every run is at rest, each until its own deadline (monotonic); those that are not come as they are."""
    waiting, seen = dict(deadlines), dict[str, Rest | Run]()
    while waiting:
        with contextlib.suppress(*AWAY), platform.sessions() as session:
            for run in session.scalars(select(Run).where(Run.id.in_(waiting))).all():
                if run.state in AT_REST:
                    # At once: the outcome says that nothing is left.
                    seen[run.id] = Rest(run, strays(run.id))
                    del waiting[run.id]
                elif time.monotonic() > waiting[run.id]:
                    seen[run.id] = run
                    del waiting[run.id]
        time.sleep(POLL_S)
    return seen


def violations(platform: Platform, seen: Rest | Run, expected: Expected) -> list[str]:
    """A sentence for everything that is not as it has to be; none is the good outcome."""
    if isinstance(seen, Run):
        return [f"is still {seen.state} ({seen.reason_code}: {seen.reason_detail}) after its deadline"]
    run_id, found = seen.run.id, list[str]()
    if seen.strays:
        found.append(f"processes {seen.strays} were still there when it was {seen.run.state}")
    # The supervisor that wrote the outcome is just leaving; whatever else is there was left behind.
    _settle(lambda: {process.pid for process in marked_processes(run_id, 10**6)} <= set(strays(run_id)))
    if left := marked_processes(run_id, 10**6):
        found.append(f"processes {[process.pid for process in left]} are left")
    with platform.sessions() as session:
        run = session.get_one(Run, run_id)
        for check in (_end, _commands, _slots, _moves):
            found += check(session, run, expected)
        found += _checkpoints(platform, session, run)
        found += _metrics(platform, session, run)
    if not expected.beside:
        found += _one_at_a_time(platform, run)
    return found


def _settle(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LEAVING_S
    while not there() and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _end(session: Session, run: Run, expected: Expected) -> Iterator[str]:
    if (run.state, run.reason_code) != (expected.state, expected.reason):
        yield f"is {run.state} ({run.reason_code}: {run.reason_detail}), not {expected.state} ({expected.reason})"
    if run.attempt not in expected.attempts:
        yield f"had {run.attempt} attempts, not {expected.attempts}"
    if run.infrastructure_failures not in expected.failures:
        yield f"counts {run.infrastructure_failures} losses, not {expected.failures}"
    if run.state == "succeeded" and run.iteration != run.num_iterations:
        yield f"succeeded at iteration {run.iteration} of {run.num_iterations}"


def _commands(session: Session, run: Run, expected: Expected) -> Iterator[str]:
    if still := open_commands(session, run.id):
        yield f"commands {[(command.kind, command.status) for command in still]} are open"


def _slots(session: Session, run: Run, expected: Expected) -> Iterator[str]:
    if slots := session.scalars(select(WorkerSlot.index).where(WorkerSlot.run_id == run.id)).all():
        yield f"slots {list(slots)} are not free"
    if run.lease_worker is not None or run.lease_expires_at is not None:
        yield f"its lease on {run.lease_worker} lasts until {run.lease_expires_at}"


def _moves(session: Session, run: Run, expected: Expected) -> Iterator[str]:
    """Every move is a declared one, and each attempt is one claim after the last was given up."""
    rows = session.scalars(select(RunEvent).where(RunEvent.run_id == run.id).order_by(RunEvent.seq)).all()
    if [row.seq for row in rows] != list(range(1, run.event_seq + 1)):
        yield f"its events are {[row.seq for row in rows]} of {run.event_seq}"
    moves = [(row.payload["from"], row.payload["to"]) for row in rows if row.type == "state"]
    state = None
    for source, to in moves:
        if source != state or (source is not None and to not in MOVES[source]):
            yield f"went from {source} to {to} after {state}"
        state = to
    if state != run.state:
        yield f"is {run.state}, its history ends with {state}"
    claims = sum(to == "starting" for _, to in moves)
    if not claims == run.attempt == run.lease_token:
        yield f"has {claims} claims, {run.attempt} attempts and lease {run.lease_token}"
    started = Counter(row.payload["token"] for row in rows if row.type == "started")
    # One that nobody can reach may still be loading when its lease is another's; its history is told in its segment.
    in_order = expected.beside or list(started) == sorted(started)
    if any(number > 1 for number in started.values()) or not in_order:
        yield f"trainers started by lease {dict(started)}"


def _checkpoints(platform: Platform, session: Session, run: Run) -> Iterator[str]:
    """What is listed is whole, and was told of by the attempt that held the lease at that time."""
    events = session.execute(
        select(RunEvent.seq, RunEvent.type, RunEvent.payload)
        .where(RunEvent.run_id == run.id, RunEvent.type.in_(["state", "checkpoint"]))
        .order_by(RunEvent.seq)
    ).all()
    # By their place in the history: a time there is that of its transaction's beginning.
    claims = [seq for seq, kind, payload in events if kind == "state" and payload["to"] == "starting"]
    told = {payload["id"]: seq for seq, kind, payload in events if kind == "checkpoint"}
    rows = session.scalars(select(Checkpoint).where(Checkpoint.run_id == run.id, Checkpoint.status == "good")).all()
    for row in rows:
        folder = platform.data / "runs" / run.id / row.path
        try:
            verify_checkpoint(folder)
            digest = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
        except (CheckpointError, OSError) as error:
            yield f"checkpoint {row.path} is not whole: {error}"
        else:
            if digest != row.manifest_sha256:
                yield f"checkpoint {row.path} has another manifest than the one recorded"
        if len(claims) > row.lease_token and told.get(row.id, 0) > claims[row.lease_token]:
            yield f"checkpoint {row.path} of lease {row.lease_token} was recorded after the next claim"
    if run.state == "succeeded" and run.num_iterations not in {row.iteration for row in rows}:
        yield "succeeded without a checkpoint of its last iteration"


def _metrics(platform: Platform, session: Session, run: Run) -> Iterator[str]:
    """Nothing lost, nothing doubled: journal, points, history and what the trainers saw are the same."""
    told = Counter((segment, event.iteration) for segment, event in platform.journal(run.id) if event.type == "metrics")
    if twice := [key for key, number in told.items() if number > 1]:
        yield f"iterations {twice} stand twice in the journal"
    journal, stored = platform.journal_metrics(run.id), platform.stored_metrics(run.id)
    if lost := sorted(journal.keys() - stored.keys()):
        yield f"{len(lost)} metric points were lost, the first is {lost[0]}"
    if more := sorted(stored.keys() - journal.keys()):
        yield f"{len(more)} metric points are not the journal's, the first is {more[0]}"
    if other := sorted(key for key in journal.keys() & stored.keys() if journal[key] != stored[key]):
        yield f"{len(other)} metric points have other values, the first is {other[0]}"
    rows = session.execute(
        select(RunEvent.segment, RunEvent.iteration).where(RunEvent.run_id == run.id, RunEvent.type == "metrics")
    )
    if (shown := Counter((segment, iteration) for segment, iteration in rows)) != told:
        yield f"its history tells of iterations {sorted((shown - told) + (told - shown))} too often or not at all"
    axes = session.execute(select(RunIteration.segment, RunIteration.iteration).where(RunIteration.run_id == run.id))
    if {tuple(row) for row in axes} != set(told):
        yield "its iterations and its journal differ"
    witnessed = {
        (segment, iteration) for segment, _, iteration, _, what in platform.witnessed(run.id) if what == "iteration"
    }
    if missing := sorted(witnessed - set(told)):
        yield f"iterations {missing} were trained and are not in the journal"
    if run.state == "succeeded":
        done = {iteration for _, iteration in told if iteration}
        if done != set(range(1, run.num_iterations + 1)):
            yield f"iterations {sorted(done)} are not 1 to {run.num_iterations}"


def _one_at_a_time(platform: Platform, run: Run) -> Iterator[str]:
    """The witness: one trainer for each lease, each beginning after the last one's end, with nothing beside it."""
    seen = platform.attempts_seen(run.id)
    ended = 0.0
    for token in sorted(seen):
        lines = seen[token]
        starts = sum(what == "start" for _, what in lines)
        if starts > 1:
            yield f"lease {token} had {starts} trainers"
        if beside := [what for _, what in lines if what.startswith("beside-")]:
            yield f"lease {token} started {', '.join(beside)}"
        if lines[0][0] < ended:
            yield f"lease {token} trained {ended - lines[0][0]:.1f} s beside the one before"
        ended = max(ended, lines[-1][0])
    if any(token > run.lease_token for token in seen):
        yield f"leases {sorted(seen)} were seen, the newest is {run.lease_token}"
