"""Webhooks as people manage them: made, listed, changed, and what was sent to each. How messages travel is in
`store.webhook_queue`.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy import func, select, tuple_
from sqlalchemy.orm import Session

from store.ids import new_id
from store.storable import storable_text
from store.webhook_queue import TEST_EVENT, queue_message, still_signing, switch_off
from store.webhook_tables import Webhook, WebhookDelivery, WebhookEvent

SECRET_PREFIX = "whsec_"
# Each signs every message, and the signatures go into one header.
MOST_OLD_SECRETS = 4


class TooManySecretsError(Exception):
    """So many earlier secrets still sign that one more has no room; `until` is when the first of them ends."""

    def __init__(self, until: datetime) -> None:
        super().__init__(f"{MOST_OLD_SECRETS} earlier secrets still sign, the first of them until {until}")
        self.until = until


@dataclass(frozen=True)
class WebhookStanding:
    """A webhook and how many of its messages wait, or were given up."""

    webhook: Webhook
    pending: int
    dead: int


def new_secret() -> str:
    """32 random bytes as Standard Webhooks writes them."""
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode("ascii")


def secret_bytes(secret: str) -> bytes:
    """The key that signs."""
    return base64.b64decode(secret.removeprefix(SECRET_PREFIX))


def create_webhook(session: Session, *, name: str, url: str, events: Sequence[str], created_by: str | None) -> Webhook:
    """A new webhook with a secret of its own."""
    webhook = Webhook(
        id=new_id("h"),
        name=storable_text(name),
        url=url,
        secret=new_secret(),
        events=list(events),
        created_by=created_by,
    )
    session.add(webhook)
    session.flush()
    session.refresh(webhook)
    return webhook


def locked_webhook(session: Session, webhook_id: str) -> Webhook | None:
    """One webhook as it is now, locked until the commit."""
    return session.get(Webhook, webhook_id, with_for_update=True, populate_existing=True)


def change_webhook(
    session: Session,
    webhook: Webhook,
    *,
    name: str | None = None,
    url: str | None = None,
    events: Sequence[str] | None = None,
    enabled: bool | None = None,
) -> None:
    """Change what is given. Switching one off gives up what waits for it."""
    if name is not None:
        webhook.name = storable_text(name)
    if url is not None:
        webhook.url = url
    if events is not None:
        webhook.events = list(events)
    session.flush()
    if enabled is True:
        webhook.enabled, webhook.disabled_reason = True, None
    elif enabled is False and webhook.enabled:
        switch_off(session, webhook.id, "switched off by hand")
    session.flush()
    session.refresh(webhook)


def rotate_secret(session: Session, webhook: Webhook, overlap: timedelta) -> None:
    """Give a webhook a new secret. The present one, and earlier ones that still do, sign beside it for a while.

    Args:
        overlap: how long the present one still signs; none ends it and all earlier ones at once.

    Raises:
        TooManySecretsError
    """
    now = session.execute(select(func.clock_timestamp())).scalar_one()
    kept = still_signing(webhook, now) if overlap else []
    if len(kept) >= MOST_OLD_SECRETS:
        raise TooManySecretsError(min(datetime.fromisoformat(one["until"]) for one in kept))
    if overlap:
        kept.append({"secret": webhook.secret, "until": (now + overlap).astimezone(UTC).isoformat()})
    webhook.secret, webhook.old_secrets = new_secret(), kept
    session.flush()


def old_secrets_until(webhook: Webhook) -> datetime | None:
    """When the last earlier secret stops signing; None where the present one signs alone."""
    ends = [datetime.fromisoformat(one["until"]) for one in still_signing(webhook, datetime.now(UTC))]
    return max(ends, default=None)


def delete_webhook(session: Session, webhook: Webhook) -> None:
    """Remove a webhook with what was to be sent to it."""
    session.delete(webhook)
    session.flush()


def send_test(session: Session, webhook: Webhook) -> tuple[WebhookDelivery, WebhookEvent]:
    """Queue a message that says nothing but that it works."""
    about = {"webhook": {"id": webhook.id, "name": webhook.name}}
    event = session.get_one(WebhookEvent, queue_message(session, TEST_EVENT, about, [webhook.id]))
    return session.scalars(select(WebhookDelivery).where(WebhookDelivery.event_id == event.id)).one(), event


def standings(session: Session, webhook_ids: Sequence[str] | None = None) -> list[WebhookStanding]:
    """All webhooks, or some, the newest first."""
    query = select(Webhook).order_by(Webhook.created_at.desc(), Webhook.id)
    counts = (
        select(
            WebhookDelivery.webhook_id,
            func.count().filter(WebhookDelivery.status == "pending"),
            func.count().filter(WebhookDelivery.status == "dead"),
        )
        .where(WebhookDelivery.status != "delivered")
        .group_by(WebhookDelivery.webhook_id)
    )
    if webhook_ids is not None:
        query = query.where(Webhook.id.in_(webhook_ids))
        counts = counts.where(WebhookDelivery.webhook_id.in_(webhook_ids))
    found = {webhook_id: (pending, dead) for webhook_id, pending, dead in session.execute(counts)}
    return [WebhookStanding(webhook, *found.get(webhook.id, (0, 0))) for webhook in session.scalars(query)]


def list_deliveries(
    session: Session, webhook_id: str, *, before: tuple[datetime, str] | None = None, limit: int
) -> list[tuple[WebhookDelivery, WebhookEvent]]:
    """What was sent to a webhook, or waits, the newest first."""
    query = (
        select(WebhookDelivery, WebhookEvent)
        .join(WebhookEvent, WebhookEvent.id == WebhookDelivery.event_id)
        .where(WebhookDelivery.webhook_id == webhook_id)
        .order_by(WebhookDelivery.created_at.desc(), WebhookDelivery.id.desc())
        .limit(limit)
    )
    if before is not None:
        query = query.where(tuple_(WebhookDelivery.created_at, WebhookDelivery.id) < tuple_(*before))
    return [(delivery, event) for delivery, event in session.execute(query)]


def find_delivery(session: Session, webhook_id: str, delivery_id: str) -> tuple[WebhookDelivery, WebhookEvent] | None:
    """One message of a webhook, its row locked until the commit."""
    delivery = session.get(WebhookDelivery, delivery_id, with_for_update=True, populate_existing=True)
    if delivery is None or delivery.webhook_id != webhook_id:
        return None
    return delivery, session.get_one(WebhookEvent, delivery.event_id)
