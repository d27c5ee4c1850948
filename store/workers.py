"""Workers: the machines that runs can be on, their slots, and whether they are alive.

A worker's id is its machine's: a worker process that starts again finds its slots as they were, with the runs that
lived on meanwhile still in them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import case, delete, exists, func, not_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from store.models import Run, Worker, WorkerSlot

# What a worker is while its process lives: draining for as long as somebody wants it so.
_ALIVE = case((Worker.drain_asked_at.is_(None), "active"), else_="draining")


class WorkerNotFound(Exception):
    """There is no worker of this id."""

    def __init__(self, worker_id: str) -> None:
        super().__init__(f"There is no worker {worker_id!r}.")
        self.worker_id = worker_id


class WorkerLeaving(Exception):
    """The worker's process is shutting down, which no request takes back."""

    def __init__(self, worker_id: str) -> None:
        super().__init__(f"Worker {worker_id} is shutting down; start it again on its machine.")


def token_file(data_dir: Path, worker_id: str) -> Path:
    """Where a worker leaves its token: who finds the token of the worker's row in it shares the folder."""
    return data_dir / "workers" / re.sub(r"[^A-Za-z0-9._-]", "_", worker_id)


def register(
    session: Session,
    *,
    worker_id: str,
    host: str,
    pid: int,
    cpu_slots: int,
    gpus: int,
    version: str,
    data_token: str,
    devices: Sequence[dict[str, Any]] = (),
) -> None:
    """Announce a worker and its slots. Slots above the number given go, but for those in use.

    One that somebody drained stays drained until somebody enables it. `devices` names its GPUs by slot number, as far
    as they are known.
    """
    columns = {
        "host": host,
        "pid": pid,
        "cpu_slots": cpu_slots,
        "gpus": gpus,
        "version": version,
        "data_token": data_token,
        "devices": list(devices),
        "started_at": func.now(),
        "heartbeat_at": func.now(),
    }
    statement = insert(Worker).values(id=worker_id, **columns)
    session.execute(
        statement.on_conflict_do_update(index_elements=["id"], set_={**columns, "state": _ALIVE}),
        execution_options={"synchronize_session": False},
    )
    for kind, number in (("cpu", cpu_slots), ("gpu", gpus)):
        if number:
            rows = [{"worker_id": worker_id, "kind": kind, "index": index} for index in range(number)]
            session.execute(insert(WorkerSlot).on_conflict_do_nothing(), rows)
        session.execute(
            delete(WorkerSlot).where(
                WorkerSlot.worker_id == worker_id,
                WorkerSlot.kind == kind,
                WorkerSlot.index >= number,
                WorkerSlot.run_id.is_(None),
            )
        )


def heartbeat(session: Session, worker_id: str, folder_fault: str | None = None) -> str:
    """Say that the worker is alive; returns its state. One that was taken for gone is back as it was.

    While there is something wrong with its data folder it claims nothing.
    """
    statement = (
        update(Worker)
        .where(Worker.id == worker_id)
        .values(
            heartbeat_at=func.now(),
            state=case((Worker.state == "gone", _ALIVE), else_=Worker.state),
            folder_fault=folder_fault,
        )
        .returning(Worker.state)
    )
    return session.scalar(statement, execution_options={"synchronize_session": False}) or "gone"


def set_state(session: Session, worker_id: str, state: str) -> None:
    """Mark a worker active, draining (it claims nothing more) or gone."""
    session.execute(update(Worker).where(Worker.id == worker_id).values(state=state))


def ask_drain(session: Session, worker_id: str, asked_by: str | None) -> Worker:
    """Have a worker claim nothing more and put its runs back into the queue, until it is enabled again.

    Its process notices at its next look. Asking again changes nothing.

    Raises:
        WorkerNotFound
    """
    worker = _locked(session, worker_id)
    if worker.drain_asked_at is None:
        worker.drain_asked_by, worker.drain_asked_at = asked_by, func.now()
    if worker.state == "active":
        worker.state = "draining"
    session.flush()
    session.refresh(worker)
    return worker


def enable(session: Session, worker_id: str) -> Worker:
    """Let a drained worker take runs again. Enabling one that takes them changes nothing.

    Raises:
        WorkerNotFound
        WorkerLeaving: nobody drained it, its process is shutting down.
    """
    worker = _locked(session, worker_id)
    if worker.state == "draining" and worker.drain_asked_at is None:
        raise WorkerLeaving(worker_id)
    worker.drain_asked_by = worker.drain_asked_at = None
    if worker.state == "draining":
        worker.state = "active"
    session.flush()
    return worker


def _locked(session: Session, worker_id: str) -> Worker:
    worker = session.get(Worker, worker_id, with_for_update=True, populate_existing=True)
    if worker is None:
        raise WorkerNotFound(worker_id)
    return worker


def mark_silent(session: Session, silent_s: float) -> list[str]:
    """Mark workers gone whose heartbeat is older than `silent_s`; silence counts only while Postgres was up."""
    age = timedelta(seconds=silent_s)
    statement = (
        update(Worker)
        .where(
            Worker.state != "gone",
            Worker.heartbeat_at < func.now() - age,
            not_(func.pg_postmaster_start_time().between(func.now() - age, func.now())),
        )
        .values(state="gone")
        .returning(Worker.id)
    )
    return list(session.scalars(statement, execution_options={"synchronize_session": False}))


def free_stray_slots(session: Session) -> int:
    """Free slots whose run no longer holds this worker. Returns how many; none, unless something went wrong."""
    holds = exists(select(Run.id).where(Run.id == WorkerSlot.run_id, Run.lease_worker == WorkerSlot.worker_id))
    statement = (
        update(WorkerSlot)
        .where(WorkerSlot.run_id.is_not(None), ~holds)
        .values(run_id=None)
        .returning(WorkerSlot.index)
        .execution_options(synchronize_session=False)
    )
    return len(session.execute(statement).all())


def supervised_runs(session: Session, worker_id: str) -> list[tuple[str, int, int]]:
    """Run, lease token and supervisor's process id of every run on this worker whose supervisor has said its own."""
    statement = select(Run.id, Run.lease_token, Run.supervisor_pid).where(
        Run.lease_worker == worker_id, Run.supervisor_pid.is_not(None)
    )
    return [(run_id, token, pid) for run_id, token, pid in session.execute(statement) if pid is not None]
