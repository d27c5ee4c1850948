"""The machines that runs can be on: who is there, what they do, and whether they take runs."""

from __future__ import annotations

import hmac
from pathlib import Path

from fastapi import APIRouter

from api.auth import least
from api.deps import Database, Hint, Settings, Who
from api.errors import not_found
from api.fleet_schemas import Slot, Worker
from api.schemas import Page
from store import audit, fleet, workers
from store.fleet import WorkerStanding

router = APIRouter(prefix="/v1/workers", tags=["workers"])


@router.get("", openapi_extra=least("viewer"))
def list_workers(database: Database, settings: Settings) -> Page[Worker]:
    """All workers known, the freshest sign of life first, each with its slots and the runs that hold them."""
    return Page[Worker](items=[_message(standing, settings.data_dir) for standing in fleet.list_workers(database)])


@router.post("/{worker_id}/drain", openapi_extra=least("operator"))
def drain_worker(worker_id: str, database: Database, settings: Settings, who: Who, hint: Hint) -> Worker:
    """Have it take no more runs and put those it has, saved, back into the queue, until it is enabled again.

    Asking again changes nothing; a worker that is gone will be drained when it comes back.
    """
    workers.ask_drain(database, worker_id, who.name)
    audit.record(database, who.name, "worker.drain", worker_id)
    database.commit()
    hint.send()
    return _one(database, worker_id, settings.data_dir)


@router.post("/{worker_id}/enable", openapi_extra=least("operator"))
def enable_worker(worker_id: str, database: Database, settings: Settings, who: Who, hint: Hint) -> Worker:
    """Let a drained worker take runs again; 409 for one that is shutting down. Asking again changes nothing."""
    workers.enable(database, worker_id)
    audit.record(database, who.name, "worker.enable", worker_id)
    database.commit()
    hint.send()
    return _one(database, worker_id, settings.data_dir)


def _one(database: Database, worker_id: str, data_dir: Path) -> Worker:
    standing = fleet.worker_standing(database, worker_id)
    if standing is None:
        raise not_found("worker", worker_id)
    return _message(standing, data_dir)


def _message(standing: WorkerStanding, data_dir: Path) -> Worker:
    worker = standing.worker
    derived = {"busy_slots", "slots", "silent_s", "data_shared"}
    return Worker(
        **{name: getattr(worker, name) for name in Worker.model_fields.keys() - derived},
        busy_slots=standing.busy_slots,
        slots=[Slot.model_validate(slot) for slot in standing.slots],
        silent_s=round(standing.silent_s, 1),
        data_shared=_shares_folder(data_dir, worker.id, worker.data_token),
    )


def _shares_folder(data_dir: Path, worker_id: str, token: str) -> bool:
    try:
        found = workers.token_file(data_dir, worker_id).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
    return hmac.compare_digest(found.encode(), token.encode())
