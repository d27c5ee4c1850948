"""The queue: runs that are `queued`, taken by priority, then age, by whichever worker has room for them.

A run of several GPUs could wait for ever while smaller ones take each GPU as it is freed. So the first one in the queue
that has waited for a stated time, and would fit into some worker, has that worker's GPUs held for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import ColumnElement, and_, func, literal, or_, select, tuple_, update
from sqlalchemy.orm import Session

from store.models import Run, Worker, WorkerSlot
from store.runs import transition

# Which runs may be claimed now, and in which order.
ELIGIBLE = (Run.state == "queued", or_(Run.not_before.is_(None), Run.not_before <= func.now()))
ORDER = (Run.priority.desc(), Run.queued_at, Run.id)


@dataclass(frozen=True)
class Claim:
    """A run that this worker now holds. `gpus` are the numbers of the GPUs that belong to it."""

    run_id: str
    token: int
    attempt: int
    gpus: tuple[int, ...]


RESERVE_AFTER_S = 600.0


def claim(session: Session, worker_id: str, lease_s: float, reserve_after_s: float = RESERVE_AFTER_S) -> Claim | None:
    """Take the best run that fits into the worker's free slots; None if there is none.

    Once a run of more GPUs than are free anywhere has waited for `reserve_after_s`, the worker that has most room
    for it gives no GPU to what stands behind it in the queue.

    The run, its slots and its lease change in the caller's one transaction. Rows that others are taking at this
    moment are skipped, so two workers never take one run, and no slot is given twice.
    """
    worker = session.get(Worker, worker_id, with_for_update=True, populate_existing=True)
    if worker is None or worker.state != "active" or worker.folder_fault is not None:
        return None
    free = (
        select(WorkerSlot)
        .where(WorkerSlot.worker_id == worker_id, WorkerSlot.run_id.is_(None))
        .order_by(WorkerSlot.kind, WorkerSlot.index)
    )
    slots = list(session.scalars(free.with_for_update(skip_locked=True), execution_options={"populate_existing": True}))
    cpus = [slot.index for slot in slots if slot.kind == "cpu" and slot.index < worker.cpu_slots]
    gpus = [slot.index for slot in slots if slot.kind == "gpu" and slot.index < worker.gpus]
    gpu_fits = and_(Run.gpus > 0, Run.gpus <= len(gpus))
    first = _held_for(session, worker, len(gpus), reserve_after_s) if gpus else None
    if first is not None:
        gpu_fits = and_(gpu_fits, _ahead_of(first))
    run = session.scalar(
        select(Run)
        .where(*ELIGIBLE, or_(and_(Run.gpus == 0, literal(bool(cpus))), gpu_fits))
        .order_by(*ORDER)
        .limit(1)
        .with_for_update(skip_locked=True)
    )
    if run is None:
        return None
    kind, taken = ("gpu", gpus[: run.gpus]) if run.gpus else ("cpu", cpus[:1])
    run = transition(
        session,
        run.id,
        "starting",
        actor=worker_id,
        lease_token=Run.lease_token + 1,
        lease_worker=worker_id,
        lease_expires_at=func.clock_timestamp() + timedelta(seconds=lease_s),
        supervisor_pid=None,
        not_before=None,
        attempt=Run.attempt + 1,
    )
    session.execute(
        update(WorkerSlot)
        .where(WorkerSlot.worker_id == worker_id, WorkerSlot.kind == kind, WorkerSlot.index.in_(taken))
        .values(run_id=run.id)
    )
    return Claim(run.id, run.lease_token, run.attempt, tuple(taken) if run.gpus else ())


def _ahead_of(run: Run) -> ColumnElement[bool]:
    """Runs that stand before this one in the queue."""
    earlier = tuple_(Run.queued_at, Run.id) < tuple_(run.queued_at, run.id)
    return or_(Run.priority > run.priority, and_(Run.priority == run.priority, earlier))


def _held_for(session: Session, worker: Worker, free_gpus: int, reserve_after_s: float) -> Run | None:
    """The run that this worker's GPUs are held for: it waited long enough, and no other worker has more room for it."""
    waited = func.now() - timedelta(seconds=reserve_after_s)
    big = session.scalar(
        select(Run)
        .where(*ELIGIBLE, Run.gpus > free_gpus, Run.gpus <= worker.gpus, Run.queued_at <= waited)
        .order_by(*ORDER)
        .limit(1)
    )
    return big if big is not None and worker_with_most_room(session, big.gpus) == worker.id else None


def worker_with_most_room(session: Session, gpus: int) -> str | None:
    """Of the active workers that have so many GPUs at all, the one with most of them free; None where there is none."""
    free = func.count().filter(WorkerSlot.run_id.is_(None))
    return session.scalar(
        select(Worker.id)
        .join(WorkerSlot, WorkerSlot.worker_id == Worker.id)
        .where(Worker.state == "active", Worker.folder_fault.is_(None), Worker.gpus >= gpus)
        .where(WorkerSlot.kind == "gpu", WorkerSlot.index < Worker.gpus)
        .group_by(Worker.id)
        .order_by(free.desc(), Worker.id)
        .limit(1)
    )


def held_gpus(session: Session, run_id: str) -> tuple[int, ...]:
    """The numbers of the GPUs that belong to a claimed run."""
    statement = select(WorkerSlot.index).where(WorkerSlot.run_id == run_id, WorkerSlot.kind == "gpu")
    return tuple(session.scalars(statement.order_by(WorkerSlot.index)))
