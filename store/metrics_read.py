"""Reading metrics: newest values, and series thinned to a number of points with every spike kept.

A run's *active line* is what survived its roll backs: each segment counts up to where the next one on the line starts.
Series that fit are sent as they are. Longer ones are cut into buckets of a power of two of iterations, counted from
zero, so that a chart does not jump while it grows; whole buckets come from the rollups where those are fine enough,
the line's and the window's edges from the points themselves.

NaN sorts above everything in Postgres, so non-finite values are counted apart and never enter a mean or a bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sqlalchemy import Row, Select, func, select, text
from sqlalchemy.orm import Session

from store.metrics_write import ROLLUP_SIZES
from store.models import Checkpoint, LatestMetric, MetricDef, Run, RunIteration, Segment

Axis = Literal["iteration", "time", "tokens"]
NO_END = 2**31 - 1


@dataclass(frozen=True)
class Latest:
    """The newest value of a metric; `value` is null where it is undefined or, with `nonfinite` set, not finite."""

    name: str
    value: float | None
    nonfinite: str | None
    iteration: int
    segment: int


@dataclass(frozen=True)
class SeriesQuery:
    """What a chart asks for. `start` and `end` bound x, both included."""

    runs: Sequence[str]
    names: Sequence[str]
    axis: Axis = "iteration"
    start: float | None = None
    end: float | None = None
    max_points: int = 500
    abandoned_too: bool = False


@dataclass
class Series:
    """One metric of one run along one segment, in columns. `nonfinite` holds indices."""

    run: str
    name: str
    segment: int
    active: bool
    bucket: int
    x: list[float] = field(default_factory=list)
    y: list[float | None] = field(default_factory=list)
    min: list[float | None] = field(default_factory=list)
    max: list[float | None] = field(default_factory=list)
    nonfinite: list[int] = field(default_factory=list)

    def add(self, x: float, y: float | None, least: float | None, greatest: float | None, *, nonfinite: bool) -> None:
        if nonfinite:
            self.nonfinite.append(len(self.x))
        self.x.append(x)
        self.y.append(_finite(y))
        self.min.append(_finite(least))
        self.max.append(_finite(greatest))


@dataclass(frozen=True)
class Piece:
    """Iterations `first` to `last` of a segment, both included."""

    segment: int
    first: int
    last: int
    active: bool


def latest(session: Session, run_id: str) -> tuple[int, list[Latest]] | None:
    """The run's event position, and newest values at least as new; None when there is no such run."""
    cursor = session.scalar(select(Run.event_seq).where(Run.id == run_id))
    if cursor is None:
        return None
    rows = session.execute(
        select(MetricDef.name, LatestMetric.value, LatestMetric.iteration, LatestMetric.segment)
        .join(MetricDef, MetricDef.id == LatestMetric.metric_id)
        .where(LatestMetric.run_id == run_id)
        .order_by(MetricDef.name)
    )
    return cursor, [
        Latest(name, _finite(value), nonfinite_name(value), iteration, segment)
        for name, value, iteration, segment in rows
    ]


def nonfinite_name(value: float | None) -> str | None:
    """The one spelling of NaN and the infinities; None for a finite number and for nothing."""
    if value is None or math.isfinite(value):
        return None
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def query_series(session: Session, query: SeriesQuery) -> tuple[dict[str, int], list[Series]]:
    """Event positions of the runs that exist, and their series.

    Positions are read before the points: following a run's events from its position misses nothing, and repeats at
    worst what is already drawn.
    """
    positions = _pairs(session, select(Run.id, Run.event_seq).where(Run.id.in_(query.runs)))
    names = _pairs(session, select(MetricDef.name, MetricDef.id).where(MetricDef.name.in_(query.names)))
    ids = [names[name] for name in query.names if name in names]
    name_of = {number: name for name, number in names.items()}
    found: list[Series] = []
    for run in query.runs:
        if run in positions and ids:
            for piece in _pieces(session, run, query):
                found.extend(_read_piece(session, run, piece, ids, name_of, query))
    return positions, found


# The active line


def active_line(session: Session, run_id: str) -> list[Piece]:
    """The surviving pieces of a run, oldest first."""
    active = session.scalar(select(Run.active_segment).where(Run.id == run_id))
    return [] if active is None else line_to(session, run_id, active)


def line_to(session: Session, run_id: str, number: int, last: int = NO_END) -> list[Piece]:
    """The pieces of a run that lead to iteration `last` of its segment `number`, oldest first."""
    segments = {segment.number: segment for segment in session.scalars(select(Segment).where(Segment.run_id == run_id))}
    starts = [segment.start_checkpoint for segment in segments.values() if segment.start_checkpoint]
    parents = _pairs(
        session,
        select(Checkpoint.id, Checkpoint.segment).where(Checkpoint.run_id == run_id, Checkpoint.id.in_(starts)),
    )
    pieces: list[Piece] = []
    parent: int | None = number
    while parent is not None and parent in segments:
        segment = segments.pop(parent)  # Popped, so that no circle can keep this going.
        # Iteration 0 is the untrained policy; a later start's own first iteration is the one after its checkpoint.
        first = segment.start_iteration + 1 if segment.start_iteration else 0
        pieces.append(Piece(segment.number, first, last, active=True))
        last = segment.start_iteration
        parent = parents.get(segment.start_checkpoint or "")
    return pieces[::-1]


def _pieces(session: Session, run_id: str, query: SeriesQuery) -> list[Piece]:
    pieces = active_line(session, run_id)
    if query.abandoned_too:
        survived = {piece.segment: piece for piece in pieces}
        for number in session.scalars(select(Segment.number).where(Segment.run_id == run_id).order_by(Segment.number)):
            kept = survived.get(number)
            first = kept.last + 1 if kept else 0
            if first <= NO_END:
                pieces.append(Piece(number, first, NO_END, active=False))
    return [cut for piece in pieces if (cut := _cut(session, run_id, piece, query)) is not None]


def _cut(session: Session, run_id: str, piece: Piece, query: SeriesQuery) -> Piece | None:
    """The part of a piece that the window shows and that has iterations at all."""
    axis = {
        "iteration": RunIteration.iteration,
        "time": func.extract("epoch", RunIteration.time),
        "tokens": RunIteration.tokens,
    }[query.axis]
    statement = select(func.min(RunIteration.iteration), func.max(RunIteration.iteration)).where(
        RunIteration.run_id == run_id,
        RunIteration.segment == piece.segment,
        RunIteration.iteration.between(piece.first, piece.last),
    )
    if query.start is not None:
        statement = statement.where(axis >= query.start)
    if query.end is not None:
        statement = statement.where(axis <= query.end)
    first, last = session.execute(statement).one()
    return None if first is None else Piece(piece.segment, first, last, piece.active)


# One piece


def _read_piece(
    session: Session, run: str, piece: Piece, ids: Sequence[int], name_of: Mapping[int, str], query: SeriesQuery
) -> list[Series]:
    series: dict[int, Series] = {}

    def of(metric: int, bucket: int) -> Series:
        return series.setdefault(metric, Series(run, name_of[metric], piece.segment, piece.active, bucket))

    few = _metrics_with_few_points(session, run, piece, ids, query.max_points)
    many = [metric for metric in ids if metric not in few]
    if few:
        x_of = _x_of_iterations(session, run, piece, query.axis, 1)
        for row in _points(session, run, piece, sorted(few)):
            if row.iteration in x_of:
                bad = nonfinite_name(row.value) is not None
                of(row.metric_id, 1).add(x_of[row.iteration], row.value, row.value, row.value, nonfinite=bad)
    if many:
        size = bucket_size(piece.first, piece.last, query.max_points)
        x_of = _x_of_iterations(session, run, piece, query.axis, size)
        for row in _buckets(session, run, piece, many, size):
            if row.bucket in x_of:
                mean = row.part_sum * (size / row.n) if row.n else None
                of(row.metric_id, size).add(
                    x_of[row.bucket], mean, row.least, row.greatest, nonfinite=row.nonfinite > 0
                )
    return [series[metric] for metric in ids if metric in series]


def bucket_size(first: int, last: int, max_points: int) -> int:
    """The least power of two that cuts iterations `first` to `last` into no more than `max_points` buckets."""
    size = 1
    while last // size - first // size + 1 > max_points:
        size *= 2
    return size


def _metrics_with_few_points(
    session: Session, run: str, piece: Piece, ids: Sequence[int], max_points: int
) -> frozenset[int]:
    if piece.last - piece.first < max_points:
        return frozenset(ids)
    rows = session.execute(
        text("""
            SELECT wanted.id FROM unnest(CAST(:ids AS smallint[])) AS wanted (id)
            WHERE (
                SELECT count(*) FROM (
                    SELECT 1 FROM metric_points
                    WHERE run_id = :run AND metric_id = wanted.id AND segment = :segment
                      AND iteration BETWEEN :first AND :last
                    LIMIT :too_many
                ) AS points
            ) < :too_many
        """),
        {**_place(run, piece), "ids": list(ids), "too_many": max_points + 1},
    )
    return frozenset(rows.scalars())


def _points(session: Session, run: str, piece: Piece, ids: Sequence[int]) -> Sequence[Row[Any]]:
    return session.execute(
        text("""
            SELECT metric_id, iteration, value FROM metric_points
            WHERE run_id = :run AND metric_id = ANY(CAST(:ids AS smallint[])) AND segment = :segment
              AND iteration BETWEEN :first AND :last
            ORDER BY metric_id, iteration
        """),
        {**_place(run, piece), "ids": list(ids)},
    ).all()


def _buckets(session: Session, run: str, piece: Piece, ids: Sequence[int], size: int) -> Sequence[Row[Any]]:
    """Rows (metric_id, bucket, n, part_sum, least, greatest, nonfinite); the sum of a bucket is part_sum · size.

    Sums are made of values divided by `size`, a power of two: that is exact and cannot overflow, which a plain sum of
    values near the largest double would, and Postgres takes an overflow for an error.
    """
    rollup = max((rolled for rolled in ROLLUP_SIZES if size >= rolled), default=None)
    inner_first, inner_last = piece.first, piece.first - 1  # Iterations that come from rollups; none at first.
    if rollup is not None:
        inner_first = -(-piece.first // rollup) * rollup
        inner_last = (piece.last + 1) // rollup * rollup - 1
    return session.execute(
        text("""
            SELECT metric_id, bucket, sum(n) AS n, sum(part_sum) AS part_sum, min(least) AS least,
                   max(greatest) AS greatest, sum(nonfinite) AS nonfinite
            FROM (
                SELECT metric_id, (bucket * size) / :size AS bucket, n, sum / :size AS part_sum,
                       min AS least, max AS greatest, nonfinite
                FROM metric_rollup
                WHERE run_id = :run AND metric_id = ANY(CAST(:ids AS smallint[])) AND segment = :segment
                  AND size = :rollup AND bucket * size BETWEEN :inner_first AND :inner_last
                UNION ALL
                SELECT metric_id, iteration / :size, (is_finite)::int,
                       CASE WHEN is_finite THEN value / :size END,
                       CASE WHEN is_finite THEN value END,
                       CASE WHEN is_finite THEN value END,
                       (NOT is_finite AND value IS NOT NULL)::int
                FROM (
                    SELECT metric_id, iteration, value,
                           coalesce(value BETWEEN -1.7976931348623157e308 AND 1.7976931348623157e308, false)
                               AS is_finite
                    FROM metric_points
                    WHERE run_id = :run AND metric_id = ANY(CAST(:ids AS smallint[])) AND segment = :segment
                      AND (iteration BETWEEN :first AND :inner_first - 1
                           OR iteration BETWEEN greatest(:inner_last + 1, :inner_first) AND :last)
                ) AS edges
            ) AS parts
            GROUP BY metric_id, bucket
            ORDER BY metric_id, bucket
        """),
        {
            **_place(run, piece),
            "ids": list(ids),
            "size": size,
            "rollup": rollup or 0,
            "inner_first": inner_first,
            "inner_last": inner_last,
        },
    ).all()


def _x_of_iterations(session: Session, run: str, piece: Piece, axis: Axis, size: int) -> Mapping[int, float]:
    """x of each bucket of `size` iterations: that of its first one in the piece."""
    if axis == "iteration":
        return _Starts(piece, size)
    rows = session.execute(
        text("""
            SELECT DISTINCT ON (iteration / :size) iteration / :size AS bucket, extract(epoch FROM time)::float8, tokens
            FROM run_iterations
            WHERE run_id = :run AND segment = :segment AND iteration BETWEEN :first AND :last
            ORDER BY iteration / :size, iteration
        """),
        {**_place(run, piece), "size": size},
    )
    return {bucket: (time if axis == "time" else float(tokens)) for bucket, time, tokens in rows}


class _Starts(Mapping[int, float]):
    """First iteration of each bucket, without a list of them."""

    def __init__(self, piece: Piece, size: int) -> None:
        self._piece = piece
        self._size = size

    def __getitem__(self, bucket: int) -> float:
        return float(max(bucket * self._size, self._piece.first))

    def __len__(self) -> int:
        return self._piece.last // self._size - self._piece.first // self._size + 1

    def __iter__(self) -> Any:
        first = self._piece.first // self._size
        return iter(range(first, first + len(self)))


def _pairs(session: Session, statement: Select[str, int]) -> dict[str, int]:
    return dict(session.execute(statement).all())


def _place(run: str, piece: Piece) -> dict[str, Any]:
    return {"run": run, "segment": piece.segment, "first": piece.first, "last": piece.last}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
