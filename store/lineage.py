"""Where a run's segments come from and what became of them; the families of runs that forks make. Only reads.

A run's history is its *active line*: each segment on it counts up to where the next one starts (see `metrics_read`).
What lies beside it was left behind by roll backs and restarts, and stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from store.metrics_read import Piece, active_line, line_to
from store.models import Checkpoint, Run, RunIteration, Segment

# More are no picture that anybody reads, and each costs some queries.
MOST_MEMBERS = 100


@dataclass(frozen=True)
class Origin:
    """The place that a segment goes on from, and the spec that held there."""

    run_id: str
    segment: int
    iteration: int
    spec: dict[str, Any] | None


@dataclass(frozen=True)
class SegmentStanding:
    """A segment with what is derived about it."""

    segment: Segment
    active: bool
    last_iteration: int
    on_active_line: tuple[int, int] | None
    origin: Origin | None


@dataclass(frozen=True)
class LeftBehind:
    """What going back to a checkpoint takes off the active line."""

    segment: int
    from_iteration: int
    to_iteration: int
    checkpoints: int


def segment_standings(session: Session, run: Run) -> list[SegmentStanding]:
    """The run's segments in the order in which they began."""
    segments = session.scalars(select(Segment).where(Segment.run_id == run.id).order_by(Segment.number)).all()
    reached = {
        number: (first, last)
        for number, first, last in session.execute(
            select(RunIteration.segment, func.min(RunIteration.iteration), func.max(RunIteration.iteration))
            .where(RunIteration.run_id == run.id)
            .group_by(RunIteration.segment)
        )
    }
    line = {piece.segment: piece for piece in active_line(session, run.id)}
    origins = _origins(session, segments)
    return [
        SegmentStanding(
            segment,
            active=segment.number == run.active_segment,
            last_iteration=max(segment.start_iteration, reached.get(segment.number, (0, 0))[1]),
            on_active_line=_shared(line.get(segment.number), reached.get(segment.number)),
            origin=origins.get(segment.start_checkpoint or ""),
        )
        for segment in segments
    ]


@dataclass(frozen=True)
class Family:
    """The runs that belong together, the eldest first; not `complete` where the youngest were left out."""

    members: list[tuple[Run, list[SegmentStanding]]]
    complete: bool


def family(session: Session, run_id: str) -> Family:
    """The run, those it was forked from, and its forks with theirs, each once.

    Forks of its ancestors that do not lead to it are left out: a family could be everything there is. So are forks,
    generation by generation, once there are `MOST_MEMBERS` runs.
    """
    members = {run_id}
    elder: str | None = run_id
    while (elder := _forked_from(session, elder)) is not None and elder not in members and len(members) < MOST_MEMBERS:
        members.add(elder)
    complete = elder is None
    younger = {run_id}
    while younger:  # Never a circle: a run is there before its forks.
        found = [fork for fork in _forks_of(session, younger) if fork not in members]
        room = MOST_MEMBERS - len(members)
        complete = complete and len(found) <= room
        younger = set(found[:room])
        members |= younger
    runs = session.scalars(select(Run).where(Run.id.in_(members)).order_by(Run.created_at, Run.id)).all()
    return Family([(run, segment_standings(session, run)) for run in runs], complete)


def left_behind(session: Session, run: Run, target: Checkpoint) -> LeftBehind | None:
    """What would leave the active line if the run went back to `target`; None when nothing would."""
    old = active_line(session, run.id)
    shared = _common_end(old, line_to(session, run.id, target.segment, target.iteration))
    last = max((end for _, end in _ends(session, run.id, old)), default=0)
    if last <= shared:
        return None
    checkpoints = [(piece.segment, max(piece.first, shared + 1), piece.last) for piece in old if piece.last > shared]
    number = sum(
        session.scalar(
            select(func.count())
            .select_from(Checkpoint)
            .where(
                Checkpoint.run_id == run.id,
                Checkpoint.segment == segment,
                Checkpoint.iteration.between(first, end),
                Checkpoint.status == "good",
            )
        )
        or 0
        for segment, first, end in checkpoints
    )
    return LeftBehind(run.active_segment, shared + 1, last, number)


def _common_end(one: Sequence[Piece], other: Sequence[Piece]) -> int:
    """The last iteration up to which two lines are the same history."""
    shared = 0
    for left, right in zip(one, other, strict=False):
        if left.segment != right.segment:
            break
        shared = min(left.last, right.last)
        if left.last != right.last:
            break
    return shared


def _ends(session: Session, run_id: str, line: Sequence[Piece]) -> Iterable[tuple[int, int]]:
    for piece in line:
        last = session.scalar(
            select(func.max(RunIteration.iteration)).where(
                RunIteration.run_id == run_id,
                RunIteration.segment == piece.segment,
                RunIteration.iteration.between(piece.first, piece.last),
            )
        )
        if last is not None:
            yield piece.segment, last


def _shared(piece: Piece | None, reached: tuple[int, int] | None) -> tuple[int, int] | None:
    if piece is None or reached is None:
        return None
    first, last = max(piece.first, reached[0]), min(piece.last, reached[1])
    return (first, last) if first <= last else None


def _origins(session: Session, segments: Sequence[Segment]) -> dict[str, Origin]:
    """By checkpoint: the place in a history that segments start from. A removed checkpoint still is one."""
    ids = [segment.start_checkpoint for segment in segments if segment.start_checkpoint]
    rows = session.execute(
        select(Checkpoint.id, Checkpoint.run_id, Checkpoint.segment, Checkpoint.iteration, Segment.spec)
        .outerjoin(Segment, (Segment.run_id == Checkpoint.run_id) & (Segment.number == Checkpoint.segment))
        .where(Checkpoint.id.in_(ids))
    )
    return {checkpoint: Origin(run, segment, iteration, spec) for checkpoint, run, segment, iteration, spec in rows}


def _forks_of(session: Session, run_ids: Iterable[str]) -> list[str]:
    """The eldest first, and no more than could be shown, and one."""
    statement = (
        select(Segment.run_id)
        .join(Checkpoint, Checkpoint.id == Segment.start_checkpoint)
        .where(Segment.kind == "fork", Checkpoint.run_id.in_(list(run_ids)))
        .order_by(Segment.created_at, Segment.run_id)
        .limit(MOST_MEMBERS + 1)
    )
    return list(session.scalars(statement))


def _forked_from(session: Session, run_id: str | None) -> str | None:
    statement = (
        select(Checkpoint.run_id)
        .join(Segment, Segment.start_checkpoint == Checkpoint.id)
        .where(Segment.run_id == run_id, Segment.kind == "fork")
    )
    return session.scalar(statement)
