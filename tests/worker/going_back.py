"""Asking a run of the test platform to go back, and what its history holds."""

from __future__ import annotations

import hashlib
from typing import Any

from sqlalchemy import select

from store.checkpoints import starting_points
from store.ids import new_id
from store.metrics_read import SeriesQuery, latest, query_series
from store.models import Checkpoint, MetricPoint, RunIteration, Sample, Segment
from store.rollback import Wish, request_rollback
from tests.worker.platform import Platform

SCORE = "reward/score_mean"


def checkpoint(platform: Platform, run_id: str, iteration: int, segment: int = 1) -> str:
    """The id of a checkpoint."""
    statement = select(Checkpoint.id).where(
        Checkpoint.run_id == run_id, Checkpoint.segment == segment, Checkpoint.iteration == iteration
    )
    with platform.sessions() as session:
        found = session.scalar(statement)
    assert found is not None, f"no checkpoint {segment}:{iteration}"
    return found


def go_back(platform: Platform, run_id: str, target: str, deadline_s: float = 30, **changes: Any) -> str:
    """Ask for it, with changed top-level fields of the spec; returns the command."""
    with platform.sessions.begin() as session:
        row = session.get_one(Checkpoint, target)
        spec = {**session.get_one(Segment, (run_id, row.segment)).spec, **changes}
        wish = Wish(target, spec, changes, "because")
        command = request_rollback(
            session, run_id, wish, command_id=new_id("c"), requested_by="ada", version=None, deadline_s=deadline_s
        )
        assert target in starting_points(session, run_id)
        return command.id


def segments(platform: Platform, run_id: str) -> list[tuple[int, str, int]]:
    """(number, kind, start_iteration) of each."""
    with platform.sessions() as session:
        rows = session.scalars(select(Segment).where(Segment.run_id == run_id).order_by(Segment.number))
        return [(row.number, row.kind, row.start_iteration) for row in rows]


def history(platform: Platform, run_id: str, segment: int) -> dict[str, Any]:
    """Everything of a segment that a roll back must leave as it is: rows and files."""
    found: dict[str, Any] = {}
    with platform.sessions() as session:
        for table in (MetricPoint, RunIteration, Sample, Checkpoint):
            rows = session.scalars(select(table).where(table.run_id == run_id, table.segment == segment))
            volatile = {"status", "status_detail", "verified_at", "files_gone"}  # pruning goes on
            columns = [column.name for column in table.__table__.columns if column.name not in volatile]
            found[table.__tablename__] = sorted(repr([getattr(row, name) for name in columns]) for row in rows)
        row = session.get_one(Segment, (run_id, segment))
        found["segment"] = repr([row.kind, row.spec, row.start_iteration, row.start_checkpoint, row.reason])
    folder = platform.segment(run_id, segment)
    found["journal"] = hashlib.sha256(folder.journal.read_bytes()).hexdigest()
    found["spec"] = folder.spec.read_text()
    return found


def scores(platform: Platform, run_id: str, *, abandoned_too: bool = False) -> dict[tuple[int, bool], list[float]]:
    """Iterations of the score's series, by segment and whether it belongs to the active line."""
    query = SeriesQuery([run_id], [SCORE], max_points=10_000, abandoned_too=abandoned_too)
    with platform.sessions() as session:
        return {(series.segment, series.active): series.x for series in query_series(session, query)[1]}


def newest_score(platform: Platform, run_id: str) -> tuple[int, int]:
    """(segment, iteration) of the newest score."""
    with platform.sessions() as session:
        found = latest(session, run_id)
    assert found is not None
    return next((value.segment, value.iteration) for value in found[1] if value.name == SCORE)
