"""Reading runs: lists with keyset cursors, a run as it stands, its events, samples, checkpoints, commands.

Health, what explains it and the reason for waiting are derived here, never stored. Nothing here writes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from sqlalchemy import and_, or_, select, tuple_
from sqlalchemy.orm import Session

from store.alerts import NO_ALERTS, OpenCounts, open_counts
from store.checkpoints import starts_from_checkpoint
from store.events import RunNotFound
from store.models import (
    Checkpoint,
    Command,
    LatestMetric,
    MetricDef,
    Run,
    RunEvent,
    Sample,
    Segment,
)
from store.states import LIVE
from store.waiting import waiting_reasons

Health = Literal["ok", "late", "unreachable", "degraded"]


@dataclass(frozen=True)
class RunStanding:
    """A run with all that is derived about it."""

    run: Run
    health: Health
    reason_code: str | None
    reason_detail: str | None
    hint: str | None
    waiting_reason: str | None
    latest: Mapping[str, float | None]
    alerts: OpenCounts


# Runs


def find_run(session: Session, run_id: str) -> Run | None:
    """The row of a run."""
    return session.get(Run, run_id)


def known_run(session: Session, run_id: str) -> Run:
    """The row of a run that has to be there.

    Raises:
        RunNotFound
    """
    run = find_run(session, run_id)
    if run is None:
        raise RunNotFound(run_id)
    return run


def run_standing(session: Session, run_id: str) -> RunStanding | None:
    """A run as it stands; None when there is no such run."""
    run = session.get(Run, run_id)
    return None if run is None else _standings(session, [run])[0]


def list_runs(
    session: Session,
    *,
    states: Sequence[str] = (),
    match: str | None = None,
    before: tuple[datetime, str] | None = None,
    limit: int,
) -> list[RunStanding]:
    """Newest runs first. `match`: the beginning of an id or name. `before`: (created_at, id) of the last run seen.

    Keyset paging: a run that is there from the beginning to the end of a walk appears in it exactly once.
    """
    query = select(Run).order_by(Run.created_at.desc(), Run.id.desc()).limit(limit)
    if states:
        query = query.where(Run.state.in_(states))
    if match is not None:
        query = query.where(or_(Run.id.startswith(match, autoescape=True), Run.name.startswith(match, autoescape=True)))
    if before is not None:
        query = query.where(tuple_(Run.created_at, Run.id) < tuple_(*before))
    return _standings(session, session.scalars(query).all())


def run_health(run: Run, now: datetime) -> Health:
    """Two clocks: does the supervisor renew its lease, does the trainer move."""
    if run.state == "recovering":
        return "degraded"
    if run.state not in LIVE:
        return "ok"
    if run.lease_expires_at is not None and run.lease_expires_at < now:
        return "unreachable"
    if run.progress_deadline_at is not None and run.progress_deadline_at < now:
        return "late"
    return "degraded" if run.infrastructure_failures else "ok"


def _reason(session: Session, run: Run, health: Health, now: datetime) -> tuple[str | None, str | None, str | None]:
    """(code, detail, hint) of how a run stands: its own, and what explains its health where it says nothing itself."""
    code, detail, hint = (None, None, None) if health == "ok" else _health_reason(session, run, health, now)
    if run.reason_detail is not None:  # A detail of another matter would explain the wrong thing.
        return run.reason_code, run.reason_detail, run.hint or hint
    return run.reason_code or code, detail, run.hint or hint


def _health_reason(session: Session, run: Run, health: Health, now: datetime) -> tuple[str | None, str, str]:
    origin = "from its last checkpoint" if starts_from_checkpoint(session, run) else "from the beginning"
    if health == "unreachable":
        since = _seconds(run.lease_expires_at, now)
        return (
            "unreachable",
            f"No sign of life from its worker for {since} s longer than allowed.",
            f"It goes on {origin} by itself once the loss is certain; see whether the worker's machine is up.",
        )
    if health == "late":
        since = _seconds(run.progress_deadline_at, now)
        return (
            "late",
            f"The trainer announced progress and is {since} s late with it.",
            f"Look at the run's log. If the trainer stays silent it is ended and restarted {origin}.",
        )
    if run.state == "recovering":
        return (
            "recovering",
            "Its trainer or worker was lost.",
            f"Nothing needs doing: it goes on {origin} once no process of it is left.",
        )
    lost = _last_loss(session, run.id)
    times = "once" if run.infrastructure_failures == 1 else f"{run.infrastructure_failures} times"
    return (
        str(lost["reason_code"]) if lost.get("reason_code") else "restarted",
        f"Was lost {times} and restarted {origin}"
        + (f"; last: {lost['reason_detail']}" if lost.get("reason_detail") else "")
        + ".",
        "Nothing needs doing while it goes on. `ppo logs RUN --supervisor` shows what ended the attempt before; that "
        "attempt's own log shows what it did last.",
    )


def _last_loss(session: Session, run_id: str) -> Mapping[str, object]:
    """The payload of the event that told of the run's newest loss; empty when there is none."""
    found: Mapping[str, object] | None = session.scalar(
        select(RunEvent.payload)
        .where(RunEvent.run_id == run_id, RunEvent.type == "state", RunEvent.payload["to"].astext == "recovering")
        .order_by(RunEvent.seq.desc())
        .limit(1)
    )
    return found or {}


def _seconds(since: datetime | None, now: datetime) -> int:
    return 0 if since is None else max(0, round((now - since).total_seconds()))


def _standings(session: Session, runs: Sequence[Run]) -> list[RunStanding]:
    now = datetime.now(UTC)
    latest: dict[str, dict[str, float | None]] = defaultdict(dict)
    for run_id, name, value in session.execute(
        select(LatestMetric.run_id, MetricDef.name, LatestMetric.value)
        .join(MetricDef, MetricDef.id == LatestMetric.metric_id)
        .where(LatestMetric.run_id.in_([run.id for run in runs]))
    ):
        latest[run_id][name] = value
    alerts = open_counts(session, [run.id for run in runs])
    waiting = waiting_reasons(session, [run for run in runs if run.state == "queued"], now)
    standings = []
    for run in runs:
        health = run_health(run, now)
        code, detail, hint = _reason(session, run, health, now)
        standings.append(
            RunStanding(
                run, health, code, detail, hint, waiting.get(run.id), latest[run.id], alerts.get(run.id, NO_ALERTS)
            )
        )
    return standings


def active_spec(session: Session, run: Run) -> dict[str, object]:
    """The full effective spec of the run's active segment."""
    spec = session.scalar(select(Segment.spec).where(Segment.run_id == run.id, Segment.number == run.active_segment))
    return run.spec if spec is None else spec


# What hangs on a run


def find_command(session: Session, run_id: str, command_id: str) -> Command | None:
    """One command of a run."""
    return session.scalar(select(Command).where(Command.run_id == run_id, Command.id == command_id))


def list_checkpoints(
    session: Session, run_id: str, *, after: tuple[int, int] | None = None, limit: int | None = None
) -> Sequence[Checkpoint]:
    """Checkpoints by segment, then iteration. `after` is the (segment, iteration) of the last one already seen."""
    query = select(Checkpoint).where(Checkpoint.run_id == run_id).order_by(Checkpoint.segment, Checkpoint.iteration)
    if after is not None:
        query = query.where(tuple_(Checkpoint.segment, Checkpoint.iteration) > after)
    return session.scalars(query.limit(limit)).all()


def list_samples(
    session: Session,
    run_id: str,
    *,
    iteration: int | None = None,
    kind: str | None = None,
    after: tuple[int, int] | None = None,
    limit: int,
) -> Sequence[Sample]:
    """Kept responses, newest iteration first. `after` is the (iteration, id) of the last one already seen."""
    query = select(Sample).where(Sample.run_id == run_id).order_by(Sample.iteration.desc(), Sample.id).limit(limit)
    if iteration is not None:
        query = query.where(Sample.iteration == iteration)
    if kind is not None:
        query = query.where(Sample.kind == kind)
    if after is not None:
        query = query.where(or_(Sample.iteration < after[0], and_(Sample.iteration == after[0], Sample.id > after[1])))
    return session.scalars(query).all()


def sample_tokens(session: Session, sample_id: int) -> dict[str, object] | None:
    """The token record of a kept response."""
    return session.scalar(select(Sample.tokens).where(Sample.id == sample_id))


# Events


def events_after(session: Session, run_id: str, after: int, limit: int) -> Sequence[RunEvent]:
    """A run's events with `seq` above `after`, in order."""
    return session.scalars(
        select(RunEvent).where(RunEvent.run_id == run_id, RunEvent.seq > after).order_by(RunEvent.seq).limit(limit)
    ).all()


def event_positions(session: Session, run_ids: Iterable[str]) -> dict[str, int]:
    """The newest `seq` of each run; runs that do not exist are left out."""
    rows = session.execute(select(Run.id, Run.event_seq).where(Run.id.in_(list(run_ids))))
    return dict(rows.all())
