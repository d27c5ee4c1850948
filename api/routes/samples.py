"""Kept responses, and their tokens."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query

from api import cursors
from api.auth import least
from api.deps import Database
from api.errors import not_found
from api.schemas import Page, Sample, SampleTokens
from store import run_read

router = APIRouter(prefix="/v1", tags=["samples"])


@router.get("/runs/{run_id}/samples", openapi_extra=least("viewer"))
def list_samples(
    run_id: str,
    database: Database,
    iteration: Annotated[int | None, Query(ge=0, le=2**31 - 1)] = None,
    kind: Annotated[Literal["train", "held_out"] | None, Query()] = None,
    cursor: Annotated[str | None, Query(max_length=200)] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> Page[Sample]:
    """Kept responses, newest iteration first."""
    run_read.known_run(database, run_id)
    after = cursors.decode_numbers(cursor) if cursor else None
    rows = run_read.list_samples(database, run_id, iteration=iteration, kind=kind, after=after, limit=limit + 1)
    last = rows[limit - 1] if len(rows) > limit else None
    return Page[Sample](
        items=[Sample.model_validate(row) for row in rows[:limit]],
        next=cursors.encode(last.iteration, last.id) if last else None,
    )


@router.get("/samples/{sample_id}/tokens", openapi_extra=least("viewer"))
def read_sample_tokens(
    sample_id: Annotated[int, Path(ge=0, le=cursors.MAX_INTEGER)], database: Database
) -> SampleTokens:
    """Every token of a kept response, with what was recorded of it."""
    tokens = run_read.sample_tokens(database, sample_id)
    if tokens is None:
        raise not_found("sample", sample_id)
    return SampleTokens.model_validate(tokens)
