"""Alerts over all runs and of one, what people say about them, and what the preflight found."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import ValidationError

from api import cursors
from api.alert_schemas import (
    LONGEST_SNOOZE_S,
    Alert,
    AlertDetail,
    AlertStatus,
    Evidence,
    Finding,
    Preflight,
    RollbackWish,
    Severity,
    SnoozeBody,
    Suggestion,
)
from api.auth import least
from api.deps import Database, Who
from api.errors import ProblemError, not_found
from api.schemas import FaultMessage, Page
from store import alerts, audit, run_read
from store.alert_tables import Alert as AlertRow
from store.models import Checkpoint
from store.preflight import last_preflight

router = APIRouter(prefix="/v1", tags=["alerts"])

LONGEST_REASON = 2000  # of a roll back

Statuses = Annotated[list[AlertStatus] | None, Query(alias="status", description="Only alerts that stand so.")]
Severities = Annotated[list[Severity] | None, Query(alias="severity", description="Only of these severities.")]
Cursor = Annotated[str | None, Query(max_length=200)]
Limit = Annotated[int, Query(ge=1, le=200)]


@router.get("/alerts", openapi_extra=least("viewer"))
def list_alerts(
    database: Database,
    run: Annotated[str | None, Query(min_length=1, max_length=200, description="Only of this run's id.")] = None,
    status: Statuses = None,
    severity: Severities = None,
    cursor: Cursor = None,
    limit: Limit = 50,
) -> Page[Alert]:
    """Alerts of all runs, the last raised first."""
    return _page(database, run, status, severity, cursor, limit)


@router.get("/runs/{run_id}/alerts", openapi_extra=least("viewer"))
def list_run_alerts(
    run_id: str,
    database: Database,
    status: Statuses = None,
    severity: Severities = None,
    cursor: Cursor = None,
    limit: Limit = 50,
) -> Page[Alert]:
    """Alerts of one run, the last raised first; those that a roll back left behind too."""
    run_read.known_run(database, run_id)
    return _page(database, run_id, status, severity, cursor, limit)


@router.get("/alerts/{alert_id}", openapi_extra=least("viewer"))
def read_alert(alert_id: str, database: Database) -> AlertDetail:
    """One alert, with its metrics around the moment."""
    row = _found(alerts.find_alert(database, alert_id), alert_id)
    return AlertDetail(**_messages(database, [row])[0].model_dump(), snapshot=row.snapshot)


@router.post("/alerts/{alert_id}/ack", openapi_extra=least("operator"))
def acknowledge_alert(alert_id: str, database: Database, who: Who) -> Alert:
    """Say that somebody has seen it. The first who does is kept; again changes nothing."""
    row = _found(alerts.locked_alert(database, alert_id), alert_id)
    if row.acknowledged_at is None:
        alerts.acknowledge(database, row, who.name)
        audit.record(database, who.name, "alert.ack", row.id, run=row.run_id, rule=row.rule)
    database.commit()
    return _messages(database, [row])[0]


@router.post("/alerts/{alert_id}/snooze", openapi_extra=least("operator"))
def snooze_alert(alert_id: str, body: SnoozeBody, database: Database, who: Who) -> Alert:
    """Hear nothing of it for a while: no webhook is told, and pages show it folded. 0 seconds ends that."""
    row = _found(alerts.locked_alert(database, alert_id), alert_id)
    alerts.snooze(database, row, _until(body), who.name)
    until = row.snoozed_until.isoformat() if row.snoozed_until else None
    audit.record(database, who.name, "alert.snooze", row.id, run=row.run_id, rule=row.rule, until=until)
    database.commit()
    return _messages(database, [row])[0]


@router.get("/runs/{run_id}/preflight", openapi_extra=least("viewer"))
def read_preflight(run_id: str, database: Database) -> Preflight:
    """What was checked before the first iteration, the last time that it was."""
    run_read.known_run(database, run_id)
    event = last_preflight(database, run_id)
    if event is None:
        return Preflight()
    findings, numbers = event.payload.get("findings"), event.payload.get("numbers")
    return Preflight(
        time=event.time,
        segment=event.segment,
        findings=[found for item in findings if (found := _finding(item))] if isinstance(findings, list) else [],
        numbers=numbers if isinstance(numbers, dict) else {},
    )


def _finding(item: Any) -> Finding | None:
    """A finding as a trainer wrote it; None for what is none."""
    try:
        return Finding.model_validate(item)
    except ValidationError:
        return None


def _until(body: SnoozeBody) -> datetime | None:
    now = datetime.now(UTC)
    if body.seconds is not None:
        return now + timedelta(seconds=body.seconds) if body.seconds else None
    assert body.until is not None
    if not now < body.until <= now + timedelta(seconds=LONGEST_SNOOZE_S):
        message = f"{body.until.isoformat()} is not within the next {LONGEST_SNOOZE_S // 86_400} days"
        fault = FaultMessage(pointer="/until", message=message)
        raise ProblemError(422, "bad_request", "The request is not valid.", errors=[fault])
    return body.until


def _page(
    database: Database,
    run_id: str | None,
    status: Sequence[AlertStatus] | None,
    severity: Sequence[Severity] | None,
    cursor: str | None,
    limit: int,
) -> Page[Alert]:
    before = cursors.decode_time_and_id(cursor) if cursor else None
    rows = alerts.list_alerts(
        database, run_id=run_id, statuses=status or (), severities=severity or (), before=before, limit=limit + 1
    )
    more, rows = len(rows) > limit, rows[:limit]
    last = rows[-1] if more else None
    return Page[Alert](
        items=_messages(database, rows), next=cursors.encode(last.raised_at.isoformat(), last.id) if last else None
    )


def _found(row: AlertRow | None, alert_id: str) -> AlertRow:
    if row is None:
        raise not_found("alert", alert_id)
    return row


def _messages(database: Database, rows: Sequence[AlertRow]) -> list[Alert]:
    names = alerts.run_names(database, {row.run_id for row in rows})
    targets = alerts.checkpoints_before(database, rows)
    derived = {"run_name", "snoozed", "suggestion", "evidence"}
    return [
        Alert(
            **{name: getattr(row, name) for name in Alert.model_fields.keys() - derived},
            run_name=names.get(row.run_id, ""),
            snoozed=alerts.is_snoozed(row),
            suggestion=_suggestion(row, targets.get(row.id)),
            evidence=[Evidence.model_validate(sign) for sign in row.evidence],
        )
        for row in rows
    ]


def _suggestion(row: AlertRow, target: Checkpoint | None) -> Suggestion | None:
    if row.suggestion is None:
        return None
    changes, reason = row.suggestion["changes"], row.suggestion["reason"] or row.title
    wish = None if target is None else RollbackWish(checkpoint=target.id, set=changes, reason=reason[:LONGEST_REASON])
    return Suggestion(
        reason=reason,
        changes=changes,
        segment=target.segment if target else None,
        iteration=target.iteration if target else None,
        rollback=wish,
    )
