"""The queue: runs that are `queued`, taken by priority, then age, by whichever worker has room for them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import and_, func, literal, or_, select, update
from sqlalchemy.orm import Session

from store.models import Run, Worker, WorkerSlot
from store.runs import transition


@dataclass(frozen=True)
class Claim:
    """A run that this worker now holds. `gpus` are the numbers of the GPUs that belong to it."""

    run_id: str
    token: int
    attempt: int
    gpus: tuple[int, ...]


def claim(session: Session, worker_id: str, lease_s: float) -> Claim | None:
    """Take the best run that fits into the worker's free slots; None if there is none.

    The run, its slots and its lease change in the caller's one transaction. Rows that others are taking at this
    moment are skipped, so two workers never take one run, and no slot is given twice.
    """
    worker = session.get(Worker, worker_id, with_for_update=True, populate_existing=True)
    if worker is None or worker.state != "active":
        return None
    free = (
        select(WorkerSlot)
        .where(WorkerSlot.worker_id == worker_id, WorkerSlot.run_id.is_(None))
        .order_by(WorkerSlot.kind, WorkerSlot.index)
    )
    slots = list(session.scalars(free.with_for_update(skip_locked=True), execution_options={"populate_existing": True}))
    cpus = [slot.index for slot in slots if slot.kind == "cpu" and slot.index < worker.cpu_slots]
    gpus = [slot.index for slot in slots if slot.kind == "gpu" and slot.index < worker.gpus]
    fits = or_(and_(Run.gpus == 0, literal(bool(cpus))), and_(Run.gpus > 0, Run.gpus <= len(gpus)))
    run = session.scalar(
        select(Run)
        .where(Run.state == "queued", or_(Run.not_before.is_(None), Run.not_before <= func.now()), fits)
        .order_by(Run.priority.desc(), Run.queued_at, Run.id)
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


def held_gpus(session: Session, run_id: str) -> tuple[int, ...]:
    """The numbers of the GPUs that belong to a claimed run."""
    statement = select(WorkerSlot.index).where(WorkerSlot.run_id == run_id, WorkerSlot.kind == "gpu")
    return tuple(session.scalars(statement.order_by(WorkerSlot.index)))
