"""Workers: the machines that runs can be on, their slots, and whether they are alive.

A worker's id is its machine's: a worker process that starts again finds its slots as they were, with the runs that
lived on meanwhile still in them.
"""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import delete, exists, func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from store.models import Run, Worker, WorkerSlot


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
) -> None:
    """Announce a worker and its slots. Slots above the number given go, but for those in use."""
    columns = {
        "host": host,
        "pid": pid,
        "state": "active",
        "cpu_slots": cpu_slots,
        "gpus": gpus,
        "version": version,
        "data_token": data_token,
        "started_at": func.now(),
        "heartbeat_at": func.now(),
    }
    session.execute(
        insert(Worker).values(id=worker_id, **columns).on_conflict_do_update(index_elements=["id"], set_=columns)
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


def heartbeat(session: Session, worker_id: str) -> str:
    """Say that the worker is alive; returns its state. One that was taken for gone is active again."""
    statement = (
        update(Worker)
        .where(Worker.id == worker_id)
        .values(heartbeat_at=func.now(), state=text("CASE state WHEN 'gone' THEN 'active' ELSE state END"))
        .returning(Worker.state)
    )
    return session.scalar(statement, execution_options={"synchronize_session": False}) or "gone"


def set_state(session: Session, worker_id: str, state: str) -> None:
    """Mark a worker active, draining (it claims nothing more) or gone."""
    session.execute(update(Worker).where(Worker.id == worker_id).values(state=state))


def mark_silent(session: Session, silent_s: float) -> list[str]:
    """Mark workers gone whose heartbeat is older than `silent_s`; silence counts only while Postgres was up."""
    age = timedelta(seconds=silent_s)
    statement = (
        update(Worker)
        .where(
            Worker.state != "gone",
            Worker.heartbeat_at < func.now() - age,
            func.pg_postmaster_start_time() < func.now() - age,
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
