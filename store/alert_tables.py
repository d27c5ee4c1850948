"""The table of alerts: what a trainer noticed in a run, and what people did about it."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import CheckConstraint, ForeignKeyConstraint, Index, Integer, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from store.base import Base, one_of

SEVERITIES = ("warning", "critical")
ALERT_STATUSES = ("open", "cleared", "left")


class Alert(Base):
    """One alert of a run's segment.

    `status` and `severity` are what `changes` say along the run's active line: an alert that was raised on a stretch
    which a roll back left is `left`, one whose clearing was left is open again. Acknowledged and snoozed are people's
    words and touch neither.
    """

    __tablename__ = "alerts"
    __table_args__ = (
        UniqueConstraint("run_id", "segment", "key"),
        ForeignKeyConstraint(["run_id", "segment"], ["segments.run_id", "segments.number"], ondelete="CASCADE"),
        CheckConstraint(one_of("status", ALERT_STATUSES), name="alerts_status_known"),
        CheckConstraint(one_of("severity", SEVERITIES), name="alerts_severity_known"),
        Index("alerts_open", "run_id", postgresql_where=text("status = 'open'")),
        Index("alerts_newest", text("raised_at DESC"), text("id DESC")),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str]
    segment: Mapped[int]  # in which it was raised
    key: Mapped[str]  # the trainer's name for it, unique in its segment
    rule: Mapped[str]
    kind: Mapped[str]
    status: Mapped[str]
    severity: Mapped[str]
    title: Mapped[str]
    detail: Mapped[str]
    meaning: Mapped[str]
    remedy: Mapped[str]
    metrics: Mapped[list[Any]]
    iteration: Mapped[int] = mapped_column(Integer)  # raised at
    onset: Mapped[int] = mapped_column(Integer)
    value: Mapped[float | None]
    baseline: Mapped[float | None]
    bound: Mapped[float | None]
    evidence: Mapped[list[Any]]
    snapshot: Mapped[dict[str, Any]]
    action: Mapped[str]
    suggestion: Mapped[dict[str, Any] | None]
    changes: Mapped[list[Any]]  # {status, segment, iteration, severity, time} of every line, in the order of arrival
    raised_at: Mapped[datetime]
    cleared_at: Mapped[datetime | None]
    cleared_iteration: Mapped[int | None]
    acknowledged_at: Mapped[datetime | None]
    acknowledged_by: Mapped[str | None]
    snoozed_until: Mapped[datetime | None]
    snoozed_by: Mapped[str | None]
