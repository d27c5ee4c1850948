"""Metric values on their way in: points, rollups, the latest values and the x axes of an iteration.

Every function is called with the segment's row locked. A point is stored once, whoever sends it again, and only a
point that was new counts in the rollups; so all of this may be repeated. One statement a table, whatever the number
of metrics: about 60 of an iteration take a few milliseconds.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import func, select, text
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.orm import Session

from store.models import Checkpoint, MetricDef, RunIteration, Segment

ROLLUP_SIZES = (64, 4096)
TOKENS = "data/response_tokens"  # an iteration's own; their sum is an x axis
LONGEST_NAME = 200
MOST_NAMES = 10_000  # over all runs; metric_defs counts in two bytes


@dataclass(frozen=True)
class IterationMetrics:
    """The metrics of one journal line: name to value, None where undefined there."""

    iteration: int
    time: datetime
    values: Mapping[str, float | None]


def split_refused(payload: Mapping[str, Any]) -> tuple[dict[str, float | None], list[str]]:
    """The metrics of a payload that can be stored, and for each other one a sentence why not."""
    good: dict[str, float | None] = {}
    refused = []
    for name, value in payload.items():
        if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
            refused.append(f"a metric's name has {len(str(name))} characters or odd ones: {str(name)[:60]!r}")
        elif value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            refused.append(f"metric {name} is a {type(value).__name__}, not a number")
        else:
            try:
                good[name] = None if value is None else float(value)
            except OverflowError:
                refused.append(f"metric {name} is larger than any float64")
    return good, refused


def write_metrics(session: Session, run_id: str, segment: int, rows: Sequence[IterationMetrics], active: bool) -> None:
    """Store the metrics of some iterations of one segment; `active` says whether it is the line that people follow."""
    if not rows:
        return
    _write_iterations(session, run_id, segment, rows)
    ids = _metric_ids(session, {name for row in rows for name in row.values})
    points = {(ids[name], row.iteration): value for row in rows for name, value in row.values.items() if name in ids}
    new = session.execute(
        text(
            "INSERT INTO metric_points (run_id, metric_id, segment, iteration, value)"
            " SELECT :run_id, metric_id, :segment, iteration, value"
            " FROM unnest(CAST(:metric_ids AS smallint[]), CAST(:iterations AS int[]), CAST(:values AS float8[]))"
            " AS t(metric_id, iteration, value)"
            " ON CONFLICT DO NOTHING RETURNING metric_id, iteration"
        ),
        {
            "run_id": run_id,
            "segment": segment,
            "metric_ids": [metric_id for metric_id, _ in points],
            "iterations": [iteration for _, iteration in points],
            "values": list(points.values()),
        },
    ).all()
    fresh = {(metric_id, iteration): points[metric_id, iteration] for metric_id, iteration in new}
    _write_rollups(session, run_id, segment, fresh)
    if active:
        _write_latest(session, run_id, segment, fresh)


def _write_iterations(session: Session, run_id: str, segment: int, rows: Sequence[IterationMetrics]) -> None:
    so_far = session.scalar(
        select(func.max(RunIteration.tokens)).where(RunIteration.run_id == run_id, RunIteration.segment == segment)
    )
    if so_far is None:
        so_far = _tokens_at_start(session, run_id, segment)
    tokens = int(so_far or 0)
    values = []
    for row in rows:
        here = row.values.get(TOKENS)
        tokens += int(here) if here is not None and math.isfinite(here) and here > 0 else 0
        values.append(
            {"run_id": run_id, "segment": segment, "iteration": row.iteration, "time": row.time, "tokens": tokens}
        )
    session.execute(upsert(RunIteration).on_conflict_do_nothing(), values)


def _tokens_at_start(session: Session, run_id: str, segment: int) -> int | None:
    """The tokens of the history that the segment goes on from, so that this x axis does not begin anew with it."""
    return session.scalar(
        select(func.max(RunIteration.tokens))
        .join(Checkpoint, (Checkpoint.run_id == RunIteration.run_id) & (Checkpoint.segment == RunIteration.segment))
        .join(Segment, Segment.start_checkpoint == Checkpoint.id)
        .where(Segment.run_id == run_id, Segment.number == segment, RunIteration.iteration <= Checkpoint.iteration)
    )


def _metric_ids(session: Session, names: Iterable[str]) -> dict[str, int]:
    """The short numbers of metric names; new names get one, up to a limit that only a mistake reaches."""

    def known() -> dict[str, int]:
        rows = session.execute(select(MetricDef.name, MetricDef.id).where(MetricDef.name.in_(list(names))))
        return {row.name: row.id for row in rows}

    ids = known()
    missing = sorted(set(names) - ids.keys())
    if missing:
        # A conflict would use up a number of the sequence too, so only names that really lack one are inserted.
        room = MOST_NAMES - (session.scalar(select(func.count()).select_from(MetricDef)) or 0)
        for name in missing[: max(room, 0)]:
            session.execute(upsert(MetricDef).values(name=name).on_conflict_do_nothing())
        ids = known()
    return ids


@dataclass
class Bucket:
    """Some neighbouring points of one metric, put together."""

    min: float | None = None
    max: float | None = None
    sum: float = 0.0
    n: int = 0
    first: float | None = None
    first_iteration: int | None = None
    last: float | None = None
    last_iteration: int | None = None
    nonfinite: int = 0

    def add(self, iteration: int, value: float) -> None:
        """Count one more point; NaN and infinities only as `nonfinite`."""
        if not math.isfinite(value):
            self.nonfinite += 1
            return
        self.min = value if self.min is None else min(self.min, value)
        self.max = value if self.max is None else max(self.max, value)
        # A sum beyond float64 stays at its edge: Postgres would refuse it, and infinity is no mean to draw.
        self.sum = min(max(self.sum + value, -sys.float_info.max), sys.float_info.max)
        self.n += 1
        if self.first_iteration is None or iteration < self.first_iteration:
            self.first, self.first_iteration = value, iteration
        if self.last_iteration is None or iteration >= self.last_iteration:
            self.last, self.last_iteration = value, iteration


_BUCKET_COLUMNS = tuple(Bucket.__dataclass_fields__)


def _write_rollups(session: Session, run_id: str, segment: int, fresh: Mapping[tuple[int, int], float | None]) -> None:
    parts = [
        (metric_id, size, iteration // size, iteration, value)
        for (metric_id, iteration), value in sorted(fresh.items())
        if value is not None
        for size in ROLLUP_SIZES
    ]
    if not parts:
        return
    keys = sorted({part[:3] for part in parts})
    arrays = {name: [key[index] for key in keys] for index, name in enumerate(("metric_ids", "sizes", "buckets"))}
    wanted = (
        "unnest(CAST(:metric_ids AS smallint[]), CAST(:sizes AS int[]), CAST(:buckets AS int[]))"
        " AS k(metric_id, size, bucket)"
    )
    columns = ", ".join(f'r."{name}"' for name in _BUCKET_COLUMNS)
    stored = session.execute(
        text(
            f"SELECT r.metric_id, r.size, r.bucket, {columns} FROM metric_rollup r JOIN {wanted}"
            " USING (metric_id, size, bucket) WHERE r.run_id = :run_id AND r.segment = :segment"
        ),
        {"run_id": run_id, "segment": segment, **arrays},
    )
    buckets = {key: Bucket() for key in keys} | {
        (metric_id, size, bucket): Bucket(*columns) for metric_id, size, bucket, *columns in stored
    }
    for metric_id, size, bucket, iteration, value in parts:
        buckets[metric_id, size, bucket].add(iteration, value)
    types = dict.fromkeys(("min", "max", "sum", "first", "last"), "float8")
    casts = ", ".join(f"CAST(:new_{name} AS {types.get(name, 'int')}[])" for name in _BUCKET_COLUMNS)
    names = ", ".join(f'"{name}"' for name in _BUCKET_COLUMNS)
    session.execute(
        text(
            f"INSERT INTO metric_rollup (run_id, segment, metric_id, size, bucket, {names})"
            f" SELECT :run_id, :segment, k.* FROM unnest(CAST(:metric_ids AS smallint[]), CAST(:sizes AS int[]),"
            f" CAST(:buckets AS int[]), {casts}) AS k"
            " ON CONFLICT (run_id, metric_id, segment, size, bucket) DO UPDATE SET "
            + ", ".join(f'"{name}" = excluded."{name}"' for name in _BUCKET_COLUMNS)
        ),
        {
            "run_id": run_id,
            "segment": segment,
            **arrays,
            **{f"new_{name}": [getattr(buckets[key], name) for key in keys] for name in _BUCKET_COLUMNS},
        },
    )


def _write_latest(session: Session, run_id: str, segment: int, fresh: Mapping[tuple[int, int], float | None]) -> None:
    newest: dict[int, tuple[int, float | None]] = {}
    for (metric_id, iteration), value in fresh.items():
        if metric_id not in newest or iteration > newest[metric_id][0]:
            newest[metric_id] = (iteration, value)
    if not newest:
        return
    session.execute(
        text(
            "INSERT INTO latest_metrics (run_id, metric_id, segment, iteration, value)"
            " SELECT :run_id, metric_id, :segment, iteration, value"
            " FROM unnest(CAST(:metric_ids AS smallint[]), CAST(:iterations AS int[]), CAST(:values AS float8[]))"
            " AS t(metric_id, iteration, value)"
            " ON CONFLICT (run_id, metric_id) DO UPDATE SET segment = excluded.segment,"
            " iteration = excluded.iteration, value = excluded.value"
            " WHERE (excluded.segment, excluded.iteration) >= (latest_metrics.segment, latest_metrics.iteration)"
        ),
        {
            "run_id": run_id,
            "segment": segment,
            "metric_ids": list(newest),
            "iterations": [iteration for iteration, _ in newest.values()],
            "values": [value for _, value in newest.values()],
        },
    )
