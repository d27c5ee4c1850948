"""Messages to webhooks on their way: written where something happens, claimed by whoever sends, marked afterwards.

A message is written in the transaction of what it tells, so neither is ever there without the other. Whoever sends one
claims it first by moving the time of its next attempt on; a sender that dies leaves it to the next after that time. So
a message may arrive twice, always under the one id of its event, and never not at all before its attempts are used up.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.orm import Session

from store.ids import new_id
from store.storable import storable_json
from store.webhook_tables import Webhook, WebhookDelivery, WebhookEvent

EVENTS = ("alert.raised", "alert.escalated", "alert.cleared", "run.state")
TEST_EVENT = "webhook.test"
KEPT = timedelta(days=30)
SWITCHED_OFF = "the webhook was switched off"


@dataclass(frozen=True)
class Claimed:
    """A message to send: `attempt` counts from 1. Every secret signs it, the present one first."""

    id: str
    webhook_id: str
    event_id: str
    url: str
    secrets: tuple[str, ...]
    attempt: int
    body: bytes


def announce(session: Session, event: str, data: Mapping[str, Any]) -> None:
    """Tell every webhook that wants this kind of event, once the caller's transaction commits."""
    wanting = select(Webhook.id).where(Webhook.enabled.is_(True), Webhook.events.contains([event]))
    # Held until then, so that one which is deleted at this moment fails nothing of what is told.
    found = session.scalars(wanting.order_by(Webhook.id).with_for_update(read=True, key_share=True)).all()
    if found:
        queue_message(session, event, data, found)


def queue_message(session: Session, event: str, data: Mapping[str, Any], webhook_ids: Collection[str]) -> str:
    """One event for some webhooks; returns its id."""
    row = WebhookEvent(id=new_id("e"), type=event, data=storable_json(data))
    session.add(row)
    session.flush()
    deliveries = [{"id": new_id("d"), "webhook_id": webhook_id, "event_id": row.id} for webhook_id in webhook_ids]
    session.execute(insert(WebhookDelivery), deliveries)
    return row.id


def claim(session: Session, lease_s: float, busy: Collection[str]) -> Claimed | None:
    """The message that has waited longest, taken for `lease_s`; none of a webhook in `busy`. None: nothing is due.

    The caller commits before it sends.
    """
    due = (
        select(WebhookDelivery.id)
        .join(Webhook, Webhook.id == WebhookDelivery.webhook_id)
        .where(
            WebhookDelivery.status == "pending",
            WebhookDelivery.next_attempt_at <= func.clock_timestamp(),
            WebhookDelivery.webhook_id.not_in(busy),
            Webhook.enabled.is_(True),
        )
        .order_by(WebhookDelivery.next_attempt_at, WebhookDelivery.id)
        .limit(1)
        .with_for_update(of=WebhookDelivery, skip_locked=True)
    )
    delivery_id = session.scalar(due)
    if delivery_id is None:
        return None
    delivery = session.get_one(WebhookDelivery, delivery_id)
    delivery.attempts += 1
    # The database's clock: that of a sender may be off by more than the lease.
    delivery.next_attempt_at = func.clock_timestamp() + timedelta(seconds=lease_s)
    webhook = session.get_one(Webhook, delivery.webhook_id)
    event = session.get_one(WebhookEvent, delivery.event_id)
    session.flush()
    now = session.execute(select(func.clock_timestamp())).scalar_one()
    secrets = (webhook.secret, *(str(one["secret"]) for one in reversed(still_signing(webhook, now))))
    return Claimed(delivery.id, webhook.id, event.id, webhook.url, secrets, delivery.attempts, message_body(event))


def still_signing(webhook: Webhook, now: datetime) -> list[dict[str, Any]]:
    """Of the earlier secrets of a webhook those that sign at that time, the oldest first."""
    return [one for one in webhook.old_secrets if datetime.fromisoformat(one["until"]) > now]


def message_body(event: WebhookEvent) -> bytes:
    """What is sent: the same bytes in every attempt."""
    message = {"type": event.type, "timestamp": event.time.astimezone(UTC).isoformat(), "data": event.data}
    return json.dumps(message, ensure_ascii=True, separators=(",", ":"), sort_keys=True).encode("ascii")


def mark_delivered(session: Session, delivery_id: str, status: int) -> None:
    """The receiver said that it has it."""
    _mark(session, delivery_id, status="delivered", last_status=status, last_error=None, finished_at=func.now())


def mark_failed(session: Session, delivery_id: str, error: str, status: int | None, again_s: float | None) -> None:
    """The attempt failed: try again in `again_s` seconds, or, with None, never."""
    if again_s is None:
        _mark(session, delivery_id, status="dead", last_status=status, last_error=error, finished_at=func.now())
    else:
        when = func.clock_timestamp() + timedelta(seconds=again_s)
        _mark(session, delivery_id, last_status=status, last_error=error, next_attempt_at=when)


def _mark(session: Session, delivery_id: str, **values: Any) -> None:
    # One that was delivered by another sender meanwhile stays so.
    session.execute(
        update(WebhookDelivery)
        .where(WebhookDelivery.id == delivery_id, WebhookDelivery.status == "pending")
        .values(values)
        .execution_options(synchronize_session=False)
    )


def switch_off(session: Session, webhook_id: str, reason: str) -> None:
    """Send nothing more to a webhook; what waits for it is dead, and can be sent again by hand."""
    session.execute(update(Webhook).where(Webhook.id == webhook_id).values(enabled=False, disabled_reason=reason))
    session.execute(
        update(WebhookDelivery)
        .where(WebhookDelivery.webhook_id == webhook_id, WebhookDelivery.status == "pending")
        .values(status="dead", last_error=SWITCHED_OFF, finished_at=func.now())
    )


def send_again(session: Session, delivery: WebhookDelivery) -> None:
    """Give a message a whole new budget of attempts, under its old id."""
    delivery.status, delivery.attempts, delivery.finished_at = "pending", 0, None
    delivery.next_attempt_at = func.now()
    session.flush()
    session.refresh(delivery)


def forget_old(session: Session) -> int:
    """Remove events that happened longer ago than `KEPT`, with their deliveries; returns how many."""
    old = delete(WebhookEvent).where(WebhookEvent.time < func.now() - KEPT).returning(WebhookEvent.id)
    return len(session.scalars(old).all())
