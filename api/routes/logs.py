"""What a run's processes printed, by byte position."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from api.auth import least
from api.deps import Database, Settings
from api.errors import not_found
from api.logs import find_log, read_log
from api.schemas import LogText
from store import run_read

router = APIRouter(prefix="/v1/runs/{run_id}/logs", tags=["logs"])

MAX_BYTES = 256 * 1024


@router.get("", openapi_extra=least("viewer"))
def read_run_log(
    run_id: str,
    database: Database,
    settings: Settings,
    attempt: Annotated[int | None, Query(ge=0, le=10**6, description="Which attempt; the newest by default.")] = None,
    rank: Annotated[int, Query(ge=0, le=10**6)] = 0,
    offset: Annotated[
        int, Query(ge=-(2**63), le=2**63 - 1, description="Byte to begin at; negative: from the end.")
    ] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_BYTES, description="Most bytes.")] = 64 * 1024,
) -> LogText:
    """A piece of a log. Beyond the end the text is empty; go on from `next_offset`."""
    run = run_read.find_run(database, run_id)
    if run is None:
        raise not_found("run", run_id)
    path = find_log(settings.data_dir / "runs" / run.id, run.attempt if attempt is None else attempt, rank)
    piece = read_log(path, offset, limit)
    return LogText.model_validate(piece)
