"""The machines that runs can be on."""

from __future__ import annotations

from fastapi import APIRouter

from api.auth import least
from api.deps import Database
from api.schemas import Page, Worker
from store import run_read

router = APIRouter(prefix="/v1/workers", tags=["workers"])


@router.get("", openapi_extra=least("viewer"))
def list_workers(database: Database) -> Page[Worker]:
    """All workers known, the freshest sign of life first."""
    names = Worker.model_fields.keys() - {"busy_slots"}
    return Page[Worker](
        items=[
            Worker(**{name: getattr(standing.worker, name) for name in names}, busy_slots=standing.busy_slots)
            for standing in run_read.list_workers(database)
        ]
    )
