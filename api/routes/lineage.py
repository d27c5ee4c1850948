"""A run's segments, and the family of runs that it belongs to."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from api import cursors
from api.auth import least
from api.deps import Database
from api.errors import not_found
from api.lineage_schemas import (
    Lineage,
    LineageRun,
    LineageSegment,
    Segment,
    SegmentDetail,
    SettingChange,
    StartedFrom,
)
from api.schemas import Page
from api.specs import spec_yaml
from ppo_core.spec import differences
from store import lineage, run_read
from store.lineage import SegmentStanding

router = APIRouter(prefix="/v1/runs/{run_id}", tags=["lineage"])


@router.get("/segments", openapi_extra=least("viewer"))
def list_segments(
    run_id: str,
    database: Database,
    cursor: Annotated[str | None, Query(max_length=200)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
) -> Page[Segment]:
    """Segments of a run, oldest first: roll backs and restarts begin one, and none is ever removed."""
    after = cursors.decode_numbers(cursor)[0] if cursor else 0
    later = [one for one in _standings(database, run_id) if one.segment.number > after]
    page = later[:limit]
    return Page[Segment](
        items=[Segment(**_fields(one), changes=_changes(one)) for one in page],
        next=cursors.encode(page[-1].segment.number, 0) if len(later) > limit else None,
    )


@router.get("/segments/{number}", openapi_extra=least("viewer"))
def read_segment(run_id: str, number: int, database: Database) -> SegmentDetail:
    """One segment with its full effective spec."""
    for one in _standings(database, run_id):
        if one.segment.number == number:
            spec = one.segment.spec
            return SegmentDetail(**_fields(one), changes=_changes(one), spec=spec, spec_yaml=spec_yaml(spec))
    raise not_found("segment", number)


@router.get("/lineage", openapi_extra=least("viewer"))
def read_lineage(run_id: str, database: Database) -> Lineage:
    """The run, those it was forked from, and its forks with theirs."""
    run_read.known_run(database, run_id)
    found = lineage.family(database, run_id)
    return Lineage(
        complete=found.complete,
        runs=[
            LineageRun(
                id=run.id,
                name=run.name,
                state=run.state,
                segments=[LineageSegment(**_fields(standing)) for standing in standings],
            )
            for run, standings in found.members
        ],
    )


def _standings(database: Database, run_id: str) -> list[SegmentStanding]:
    return lineage.segment_standings(database, run_read.known_run(database, run_id))


def _fields(standing: SegmentStanding) -> dict[str, Any]:
    row, origin = standing.segment, standing.origin
    columns = ("number", "kind", "start_iteration", "start_checkpoint", "created_at", "created_by", "reason")
    return {
        **{name: getattr(row, name) for name in columns},
        "active": standing.active,
        "last_iteration": standing.last_iteration,
        "on_active_line": standing.on_active_line,
        "started_from": None
        if origin is None
        else StartedFrom(run_id=origin.run_id, segment=origin.segment, iteration=origin.iteration),
    }


def _changes(standing: SegmentStanding) -> list[SettingChange]:
    origin = standing.origin
    if origin is None or origin.spec is None:
        return []
    return [
        SettingChange(path=change.path, before=change.before, after=change.after)
        for change in differences(origin.spec, standing.segment.spec)
    ]
