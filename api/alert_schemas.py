"""What travels over REST about alerts and preflight."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import Field, model_validator

from api.schemas import Body, Message, Time

AlertStatus = Literal["open", "cleared", "left"]
Severity = Literal["warning", "critical"]
LONGEST_SNOOZE_S = 30 * 86_400


class RollbackWish(Message):
    """The body of a POST to the run's `rollback`, ready to be sent as it is."""

    checkpoint: str
    set: dict[str, Any]
    reason: str


class Suggestion(Message):
    """The way back that an alert suggests."""

    reason: str
    changes: dict[str, Any] = Field(description="Settings by dotted name.")
    segment: int | None = Field(description="Of the checkpoint to go back to.")
    iteration: int | None
    rollback: RollbackWish | None = Field(
        description="What to post to `/v1/runs/{id}/rollback`; null: no good checkpoint lies before the onset."
    )


class Evidence(Message):
    """One sign: how a metric stood before the onset, and how it stands."""

    metric: str | None = None
    then: Any = None
    now: Any = None
    text: str = ""


class Alert(Message):
    """Something that a trainer noticed, and how it stands."""

    id: str
    run_id: str
    run_name: str
    segment: int = Field(description="In which it was raised.")
    key: str = Field(description="The trainer's own name for it, unique in its segment.")
    rule: str = Field(description="`band:METRIC`, `story:NAME` or `gate:judge`.")
    kind: Literal["band", "story", "gate"]
    status: AlertStatus = Field(description="left: it was raised on a stretch that a roll back left behind.")
    severity: Severity
    title: str
    detail: str
    meaning: str
    remedy: str
    metrics: list[str] = Field(description="Registry keys, the main one first.")
    iteration: int = Field(description="Raised at.")
    onset: int = Field(description="The first iteration from which its metrics moved.")
    value: float | None
    baseline: float | None
    bound: float | None
    evidence: list[Evidence]
    action: Literal["note", "pause", "stop"] = Field(description="What the run's spec makes of it.")
    suggestion: Suggestion | None
    raised_at: Time
    cleared_at: Time | None
    cleared_iteration: int | None
    acknowledged_at: Time | None
    acknowledged_by: str | None
    snoozed_until: Time | None = Field(description="No webhook is told of it until then.")
    snoozed_by: str | None
    snoozed: bool = Field(description="Whether that time is still to come.")


class AlertDetail(Alert):
    """An alert with the series around the moment it was raised."""

    snapshot: dict[str, list[tuple[int, float | None]]] = Field(description="Metric to (iteration, value) pairs.")


class SnoozeBody(Body):
    """How long to hear nothing of it: exactly one of the two."""

    until: datetime | None = Field(None, description="A time with its zone, at most 30 days ahead.")
    seconds: int | None = Field(None, ge=0, le=LONGEST_SNOOZE_S, description="From now on; 0 ends a snooze.")

    @model_validator(mode="after")
    def _exactly_one(self) -> SnoozeBody:
        if (self.until is None) == (self.seconds is None):
            raise ValueError("give either `until` (a time with its zone) or `seconds`; 0 seconds ends a snooze")
        if self.until is not None and self.until.tzinfo is None:
            raise ValueError("give `until` with its zone, as in 2030-01-31T12:00:00Z")
        return self


class Finding(Message):
    """What one check of the preflight found."""

    check: str
    status: Literal["ok", "warning", "failed"]
    detail: str = ""
    remedy: str = ""


class Preflight(Message):
    """What was checked before the first iteration; `time` is null where nothing was."""

    time: Time | None = None
    segment: int | None = None
    findings: list[Finding] = Field([])
    numbers: dict[str, Any] = Field({})
