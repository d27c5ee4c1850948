"""Reading the fleet: which workers there are, and which runs hold their slots. Nothing here writes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from store.models import Run, Worker, WorkerSlot


@dataclass(frozen=True)
class SlotStanding:
    """A GPU or CPU slot, and the run that holds it; `device` and `memory_gib` are a GPU's, where they are known."""

    kind: str
    index: int
    device: str | None
    memory_gib: float | None
    run_id: str | None
    run_name: str | None
    run_state: str | None


@dataclass(frozen=True)
class WorkerStanding:
    """A worker, how long ago it said that it is alive (by the database's clock), and its slots."""

    worker: Worker
    silent_s: float
    slots: tuple[SlotStanding, ...]

    @property
    def takes_runs(self) -> bool:
        """Whether it claims what fits: it is alive, not draining, and sees the platform's data folder."""
        return self.worker.state == "active" and self.worker.folder_fault is None

    @property
    def busy_slots(self) -> int:
        return sum(slot.run_id is not None for slot in self.slots)

    def free(self, kind: str) -> int:
        """How many slots of a kind nobody holds; slots that are being given up do not count."""
        most = self.worker.gpus if kind == "gpu" else self.worker.cpu_slots
        return sum(slot.kind == kind and slot.run_id is None and slot.index < most for slot in self.slots)


def list_workers(session: Session) -> list[WorkerStanding]:
    """All workers known, the freshest sign of life first."""
    slots = defaultdict(list)
    rows = session.execute(
        select(WorkerSlot, Run.name, Run.state)
        .outerjoin(Run, Run.id == WorkerSlot.run_id)
        .order_by(WorkerSlot.kind.desc(), WorkerSlot.index)
    )
    for slot, name, state in rows:
        slots[slot.worker_id].append((slot, name, state))
    silent = func.extract("epoch", func.clock_timestamp() - Worker.heartbeat_at)
    found = session.execute(
        select(Worker, silent).order_by(Worker.heartbeat_at.desc(), Worker.id),
        execution_options={"populate_existing": True},
    )
    return [
        WorkerStanding(worker, max(0.0, float(age)), tuple(_slot(worker, *row) for row in slots[worker.id]))
        for worker, age in found
    ]


def worker_standing(session: Session, worker_id: str) -> WorkerStanding | None:
    """One worker; None when there is none of this id."""
    return next((standing for standing in list_workers(session) if standing.worker.id == worker_id), None)


def _slot(worker: Worker, slot: WorkerSlot, run_name: str | None, run_state: str | None) -> SlotStanding:
    device = worker.devices[slot.index] if slot.kind == "gpu" and slot.index < len(worker.devices) else {}
    return SlotStanding(
        slot.kind, slot.index, device.get("name"), device.get("memory_gib"), slot.run_id, run_name, run_state
    )


def most_gpus(workers: Iterable[WorkerStanding]) -> int | None:
    """GPUs of the largest of these workers, gone ones included: they may come back. None where no worker is known."""
    return max((standing.worker.gpus for standing in workers), default=None)
