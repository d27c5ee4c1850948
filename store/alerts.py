"""Alerts: what trainers noticed, kept as rows, and what people say about them.

A trainer tells in its journal that an alert was raised, became critical, or cleared. All of it is kept as the alert's
`changes`, each with its place in the run's history; how the alert stands follows from those on the active line. So
going back leaves an alert behind, or opens it again, as it does with everything else. An alert of a checkpoint's state
may clear in a later segment than it was raised in: it is looked for along the line.

Acknowledging and snoozing are people's words. The trainer never hears of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError
from sqlalchemy import and_, func, or_, select, tuple_
from sqlalchemy.orm import Session

from store.alert_tables import Alert
from store.events import append_event
from store.ids import new_id
from store.metrics_read import Piece, active_line, line_to
from store.models import Checkpoint, Run
from store.storable import storable_json
from store.webhook_queue import announce

Status = Literal["open", "cleared", "left"]
Severity = Literal["warning", "critical"]
MAX_TEXT = 20_000


class Sign(BaseModel):
    """One piece of evidence: how a metric stood, and stands."""

    metric: str | None = None
    then: Any = None
    now: Any = None
    text: str = Field("", max_length=MAX_TEXT)


class Suggestion(BaseModel):
    """Where the trainer would go back to, `segment:iteration`, and with which settings."""

    checkpoint: str | None = Field(None, max_length=64)
    changes: dict[str, Any] = Field({}, max_length=200)
    reason: str = Field("", max_length=MAX_TEXT)


class AlertNews(BaseModel):
    """The payload of a journal's `alert` event."""

    id: str = Field(min_length=1, max_length=300)
    status: Literal["raised", "escalated", "cleared"]
    rule: str = Field(min_length=1, max_length=300)
    kind: Literal["band", "story", "gate"]
    severity: Severity
    metrics: list[str] = Field(max_length=100)
    title: str = Field(max_length=MAX_TEXT)
    detail: str = Field(max_length=MAX_TEXT)
    meaning: str = Field(max_length=MAX_TEXT)
    remedy: str = Field(max_length=MAX_TEXT)
    iteration: int = Field(ge=0, lt=2**31)
    onset: int = Field(ge=0, lt=2**31)
    value: float | None
    baseline: float | None
    bound: float | None
    evidence: list[Sign] = Field(max_length=200)
    snapshot: dict[str, list[tuple[int, float | None]]] = Field(max_length=500)
    action: Literal["note", "pause", "stop"]
    suggestion: Suggestion | None

    @classmethod
    def of(cls, payload: Mapping[str, Any]) -> AlertNews:
        """Read a payload.

        Raises:
            ValueError: it breaks the contract; the message names the first field that does.
        """
        try:
            return cls.model_validate(storable_json(payload))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"{place}: {first['msg']}") from error


@dataclass(frozen=True)
class OpenCounts:
    """How many alerts of a run are open by severity; snoozed ones are counted apart."""

    warning: int = 0
    critical: int = 0
    snoozed: int = 0


NO_ALERTS = OpenCounts()


# What the trainer says


def take_news(
    session: Session, run: Run, segment: int, iteration: int, time: datetime, payload: Mapping[str, Any]
) -> Alert:
    """Store one `alert` event of a segment's journal, at `iteration`. The caller makes sure that it comes once.

    Raises:
        ValueError: the payload breaks the contract.
    """
    news = AlertNews.of(payload)
    found = _find(session, run.id, segment, news)
    alert = found or _new_row(run.id, segment, news, time)
    entry = {
        "status": news.status,
        "severity": news.severity,
        "segment": segment,
        "iteration": iteration,
        "time": time.isoformat(),
    }
    alert.changes = [*alert.changes, entry]
    if found is not None and news.status != "cleared":
        for name, value in _description(news).items():
            setattr(alert, name, value)
    line = active_line(session, run.id)
    _settle(alert, line)
    if found is None:
        session.add(alert)
    session.flush()
    if alert.status != "left":
        _announce(session, run, alert, news.status)
    return alert


def _announce(session: Session, run: Run, alert: Alert, what: str) -> None:
    if not is_snoozed(alert):
        announce(session, f"alert.{what}", {"run": {"id": run.id, "name": run.name}, "alert": told_fields(alert)})


def settle_alerts(session: Session, run_id: str) -> None:
    """How every alert of a run stands on the line that is now its active one.

    Webhooks hear of what is open no longer as cleared, and of what is open again as raised.
    """
    line = active_line(session, run_id)
    run = session.get_one(Run, run_id)
    for alert in session.scalars(select(Alert).where(Alert.run_id == run_id)):
        before = alert.status
        _settle(alert, line)
        if "open" in (before, alert.status) and alert.status != before:
            _announce(session, run, alert, "raised" if alert.status == "open" else "cleared")
    session.flush()


def copy_open_alerts(session: Session, source: Checkpoint, run_id: str) -> None:
    """Give a fork the alerts that are open in its checkpoint's state: its trainer will only say that they clear."""
    line = line_to(session, source.run_id, source.segment, source.iteration)
    for alert in session.scalars(select(Alert).where(Alert.run_id == source.run_id)):
        standing = _along(alert, line)
        if standing and standing[-1]["status"] != "cleared":
            columns = {column.name: getattr(alert, column.name) for column in Alert.__table__.columns}
            told = {**standing[-1], "status": "raised", "segment": 1, "iteration": source.iteration}
            mine = {"id": new_id("a"), "run_id": run_id, "segment": 1, "status": "open", "changes": [told]}
            nobody = dict.fromkeys(
                ("acknowledged_at", "acknowledged_by", "snoozed_until", "snoozed_by", "cleared_at", "cleared_iteration")
            )
            session.add(Alert(**{**columns, **mine, **nobody, "severity": told["severity"]}))
    session.flush()


def _find(session: Session, run_id: str, segment: int, news: AlertNews) -> Alert | None:
    """The alert of this name that a segment inherited or raised; the one of the youngest segment on its line."""
    on_line = {piece.segment: piece for piece in line_to(session, run_id, segment)}
    named = session.scalars(
        select(Alert)
        .where(Alert.run_id == run_id, Alert.key == news.id, Alert.segment.in_(on_line))
        .order_by(Alert.segment.desc())
    )
    for alert in named:
        if alert.segment == segment or (news.status != "raised" and alert.iteration <= on_line[alert.segment].last):
            return alert
    return None


def _new_row(run_id: str, segment: int, news: AlertNews, time: datetime) -> Alert:
    return Alert(
        id=new_id("a"),
        run_id=run_id,
        segment=segment,
        key=news.id,
        rule=news.rule,
        kind=news.kind,
        iteration=news.iteration,
        onset=news.onset,
        changes=[],
        raised_at=time,
        **_description(news),
    )


def _description(news: AlertNews) -> dict[str, Any]:
    """What may read otherwise once an alert has become critical."""
    texts = ("title", "detail", "meaning", "remedy", "metrics", "action", "value", "baseline", "bound")
    return {
        **{name: getattr(news, name) for name in texts},
        "evidence": [sign.model_dump() for sign in news.evidence],
        "snapshot": {name: [list(point) for point in points] for name, points in news.snapshot.items()},
        "suggestion": None if news.suggestion is None else news.suggestion.model_dump(),
    }


def _along(alert: Alert, line: Iterable[Piece]) -> list[dict[str, Any]]:
    """The changes that lie on a line, in its order. What a late journal brings may have come out of it."""
    last = {piece.segment: piece.last for piece in line}
    kept = [change for change in alert.changes if change["iteration"] <= last.get(change["segment"], -1)]
    return sorted(kept, key=lambda change: (change["segment"], change["iteration"]))


def _settle(alert: Alert, line: Iterable[Piece]) -> None:
    standing = _along(alert, line)
    alert.cleared_at = alert.cleared_iteration = None
    if not standing:
        alert.status, alert.severity = "left", alert.changes[-1]["severity"]
        return
    end = standing[-1]
    alert.severity = end["severity"]
    alert.status = "cleared" if end["status"] == "cleared" else "open"
    if alert.status == "cleared":
        alert.cleared_at, alert.cleared_iteration = datetime.fromisoformat(end["time"]), end["iteration"]


# What people say


def acknowledge(session: Session, alert: Alert, actor: str) -> None:
    """Somebody has seen it; the first who says so is kept."""
    if alert.acknowledged_at is None:
        alert.acknowledged_at, alert.acknowledged_by = datetime.now(UTC), actor
        _tell_pages(session, alert, "acknowledged", actor)


def snooze(session: Session, alert: Alert, until: datetime | None, actor: str) -> None:
    """Send nothing about it, and show it folded, until then; None ends that."""
    alert.snoozed_until, alert.snoozed_by = until, actor if until else None
    _tell_pages(session, alert, "snoozed" if until else "unsnoozed", actor)


def is_snoozed(alert: Alert) -> bool:
    """Whether somebody wants no news of it now."""
    return alert.snoozed_until is not None and alert.snoozed_until > datetime.now(UTC)


def _tell_pages(session: Session, alert: Alert, status: str, actor: str) -> None:
    payload = {
        **event_fields(alert),
        "status": status,
        "snoozed_until": alert.snoozed_until.isoformat() if alert.snoozed_until else None,
    }
    append_event(session, alert.run_id, "alert", payload, segment=alert.segment, iteration=alert.iteration, actor=actor)


def event_fields(alert: Alert) -> dict[str, Any]:
    """What the run's history holds of an alert beside its `status`: enough to name it."""
    names = ("rule", "kind", "severity", "metrics", "title", "remedy", "iteration", "onset", "action")
    return {"alert_id": alert.id, "id": alert.key, **{name: getattr(alert, name) for name in names}}


def told_fields(alert: Alert) -> dict[str, Any]:
    """An alert as webhooks carry it: all but the series around it."""
    names = (
        "id", "key", "rule", "kind", "status", "severity", "title", "detail", "meaning", "remedy", "metrics", "segment",
        "iteration", "onset", "value", "baseline", "bound", "action", "cleared_iteration",
    )  # fmt: skip
    return {name: getattr(alert, name) for name in names}


# Reading


def find_alert(session: Session, alert_id: str) -> Alert | None:
    """One alert by its id."""
    return session.get(Alert, alert_id)


def locked_alert(session: Session, alert_id: str) -> Alert | None:
    """One alert by its id as it is now, its run and it locked until the commit."""
    run_id = session.scalar(select(Alert.run_id).where(Alert.id == alert_id))
    # The run first, as whoever brings news of its trainer has it: else each could wait for the other.
    if run_id is None or session.get(Run, run_id, with_for_update=True, populate_existing=True) is None:
        return None
    return session.get(Alert, alert_id, with_for_update=True, populate_existing=True)


def list_alerts(
    session: Session,
    *,
    run_id: str | None = None,
    statuses: Sequence[str] = (),
    severities: Sequence[str] = (),
    before: tuple[datetime, str] | None = None,
    limit: int,
) -> Sequence[Alert]:
    """Alerts, the last raised first. `before`: (raised_at, id) of the last one seen."""
    query = select(Alert).order_by(Alert.raised_at.desc(), Alert.id.desc()).limit(limit)
    if run_id is not None:
        query = query.where(Alert.run_id == run_id)
    if statuses:
        query = query.where(Alert.status.in_(statuses))
    if severities:
        query = query.where(Alert.severity.in_(severities))
    if before is not None:
        query = query.where(tuple_(Alert.raised_at, Alert.id) < tuple_(*before))
    return session.scalars(query).all()


def open_counts(session: Session, run_ids: Iterable[str]) -> dict[str, OpenCounts]:
    """Open alerts of each run; runs without any are left out."""
    snoozed = and_(Alert.snoozed_until.is_not(None), Alert.snoozed_until > func.now())
    awake = or_(Alert.snoozed_until.is_(None), Alert.snoozed_until <= func.now())
    rows = session.execute(
        select(
            Alert.run_id,
            func.count().filter(awake, Alert.severity == "warning"),
            func.count().filter(awake, Alert.severity == "critical"),
            func.count().filter(snoozed),
        )
        .where(Alert.status == "open", Alert.run_id.in_(list(run_ids)))
        .group_by(Alert.run_id)
    )
    return {run_id: OpenCounts(warning, critical, quiet) for run_id, warning, critical, quiet in rows}


def open_onsets(session: Session, run_id: str) -> tuple[int, ...]:
    """The iterations with which the open alerts of a run began."""
    return tuple(session.scalars(select(Alert.onset).where(Alert.run_id == run_id, Alert.status == "open").distinct()))


def checkpoints_before(session: Session, alerts: Sequence[Alert]) -> dict[str, Checkpoint]:
    """Alert id to the checkpoint of its suggestion; where that is not good any more, to the newest before the onset.

    An alert without a suggestion, or with nothing good to go back to, is not in it.
    """
    wanted = [alert for alert in alerts if alert.suggestion is not None]
    good: dict[str, list[Checkpoint]] = {}
    lines: dict[tuple[str, int], list[Piece]] = {}
    found = {}
    for alert in wanted:
        if alert.run_id not in good:
            rows = select(Checkpoint).where(Checkpoint.run_id == alert.run_id, Checkpoint.status == "good")
            good[alert.run_id] = list(session.scalars(rows.order_by(Checkpoint.segment, Checkpoint.iteration)))
        place = (alert.run_id, alert.segment)
        if place not in lines:
            lines[place] = line_to(session, *place)
        last = {piece.segment: min(piece.last, alert.onset - 1) for piece in lines[place]}
        named = (alert.suggestion or {}).get("checkpoint")
        exact = [row for row in good[alert.run_id] if f"{row.segment}:{row.iteration}" == named]
        before = [row for row in good[alert.run_id] if row.iteration <= last.get(row.segment, -1)]
        if exact or before:
            found[alert.id] = (exact or before)[-1]
    return found


def run_names(session: Session, run_ids: Iterable[str]) -> dict[str, str]:
    """Names of runs by id."""
    return dict(session.execute(select(Run.id, Run.name).where(Run.id.in_(list(run_ids)))).all())
