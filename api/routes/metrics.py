"""Metrics: newest values, series for charts, and what every metric means."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query

from api.auth import least
from api.deps import Database
from api.errors import ProblemError, not_found
from api.schemas import FaultMessage, LatestMetric, LatestMetrics, MetricQuery, Registry, Series
from ppo_core import registry
from store import metrics_read

router = APIRouter(prefix="/v1", tags=["metrics"])

MAX_RUNS = 20
MAX_NAMES = 100
MAX_POINTS = 10_000
MAX_TEXT = 20_000


@router.get("/runs/{run_id}/metrics", openapi_extra=least("viewer"))
def read_latest_metrics(run_id: str, database: Database) -> LatestMetrics:
    """The newest value of each metric, and the cursor to follow the run's events from."""
    found = metrics_read.latest(database, run_id)
    if found is None:
        raise not_found("run", run_id)
    cursor, values = found
    return LatestMetrics(cursor=cursor, latest=[LatestMetric.model_validate(value) for value in values])


@router.get("/metrics/query", openapi_extra=least("viewer"))
def query_metrics(
    database: Database,
    runs: Annotated[str, Query(max_length=MAX_TEXT, description="Run ids, by commas.")],
    names: Annotated[str, Query(max_length=MAX_TEXT, description="Metric names, by commas.")],
    x: Annotated[metrics_read.Axis, Query(description="What x is; times are seconds since 1970.")] = "iteration",
    start: Annotated[float | None, Query(alias="from", allow_inf_nan=False, description="Least x.")] = None,
    end: Annotated[float | None, Query(alias="to", allow_inf_nan=False, description="Greatest x.")] = None,
    max_points: Annotated[int, Query(ge=1, le=MAX_POINTS, description="Most points of a series.")] = 500,
    segments: Annotated[
        Literal["active", "all"], Query(description="`all`: also what was left behind by roll backs.")
    ] = "active",
) -> MetricQuery:
    """Series in columns. Where there are more points than asked for, buckets keep their mean, least and greatest."""
    asked = metrics_read.SeriesQuery(
        runs=_split("runs", runs, MAX_RUNS),
        names=_split("names", names, MAX_NAMES),
        axis=x,
        start=start,
        end=end,
        max_points=max_points,
        abandoned_too=segments == "all",
    )
    cursors, series = metrics_read.query_series(database, asked)
    missing = [run for run in asked.runs if run not in cursors]
    if missing:
        raise not_found("run", missing[0])
    return MetricQuery(series=[Series.model_validate(one) for one in series], cursors=cursors)


@router.get("/metrics/registry", openapi_extra=least("viewer"))
def read_registry() -> Registry:
    """Every metric: formula, unit, healthy band, what it means when it leaves it, and what to do then."""
    return Registry(items=list(registry.METRICS.values()), panels=dict(registry.PANELS))


def _split(name: str, text: str, most: int) -> tuple[str, ...]:
    parts = tuple(dict.fromkeys(part for part in text.split(",") if part))
    if 1 <= len(parts) <= most:
        return parts
    fault = FaultMessage(pointer=f"/query/{name}", message=f"give 1 to {most} by commas, not {len(parts)}")
    raise ProblemError(422, "bad_request", "The request is not valid.", errors=[fault])
