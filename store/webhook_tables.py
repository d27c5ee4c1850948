"""The tables of webhooks: who is told, of what, and what became of each message."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Boolean, CheckConstraint, ForeignKey, Index, Integer, UniqueConstraint, func, text
from sqlalchemy.orm import Mapped, mapped_column

from store.base import Base, one_of

DELIVERY_STATUSES = ("pending", "delivered", "dead")


class Webhook(Base):
    """An address that is told what happens. The secret signs messages, so it is kept as it is; it is shown once.

    Each of `old_secrets` is `{"secret": ..., "until": ...}`, an ISO time up to which it signs beside the present one.
    """

    __tablename__ = "webhooks"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    url: Mapped[str]
    secret: Mapped[str]
    old_secrets: Mapped[list[Any]] = mapped_column(server_default=text("'[]'::jsonb"))
    events: Mapped[list[Any]]
    enabled: Mapped[bool] = mapped_column(Boolean, server_default=text("true"))
    disabled_reason: Mapped[str | None]
    created_by: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class WebhookEvent(Base):
    """One thing to tell, written in the transaction in which it happened. Its id is the message's in every delivery."""

    __tablename__ = "webhook_events"
    __table_args__ = (Index("webhook_events_time", "time"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    type: Mapped[str]
    time: Mapped[datetime] = mapped_column(server_default=func.now())
    data: Mapped[dict[str, Any]]


class WebhookDelivery(Base):
    """One message to one webhook. While somebody sends it, `next_attempt_at` is when others may try again."""

    __tablename__ = "webhook_deliveries"
    __table_args__ = (
        UniqueConstraint("webhook_id", "event_id"),
        CheckConstraint(one_of("status", DELIVERY_STATUSES), name="webhook_deliveries_status_known"),
        Index("webhook_deliveries_due", "next_attempt_at", postgresql_where=text("status = 'pending'")),
        Index("webhook_deliveries_newest", "webhook_id", text("created_at DESC"), text("id DESC")),
        Index("webhook_deliveries_event", "event_id"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    webhook_id: Mapped[str] = mapped_column(ForeignKey("webhooks.id", ondelete="CASCADE"))
    event_id: Mapped[str] = mapped_column(ForeignKey("webhook_events.id", ondelete="CASCADE"))
    status: Mapped[str] = mapped_column(server_default="pending")
    attempts: Mapped[int] = mapped_column(Integer, server_default="0")
    next_attempt_at: Mapped[datetime] = mapped_column(server_default=func.now())
    last_status: Mapped[int | None]
    last_error: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    finished_at: Mapped[datetime | None]
