"""Checkpoints of a run."""

from __future__ import annotations

from fastapi import APIRouter

from api.auth import least
from api.deps import Database
from api.errors import not_found
from api.schemas import Checkpoint, Page
from store import run_read

router = APIRouter(prefix="/v1/runs/{run_id}/checkpoints", tags=["checkpoints"])


@router.get("", openapi_extra=least("viewer"))
def list_checkpoints(run_id: str, database: Database) -> Page[Checkpoint]:
    """All checkpoints of a run's segments, oldest first."""
    if run_read.find_run(database, run_id) is None:
        raise not_found("run", run_id)
    return Page[Checkpoint](
        items=[Checkpoint.model_validate(row) for row in run_read.list_checkpoints(database, run_id)]
    )
