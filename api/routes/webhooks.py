"""Webhooks: who is told what happens, and what became of each message."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Query, Response

from api import cursors
from api.auth import least
from api.deps import Database, Settings, Who
from api.errors import ProblemError, not_found
from api.schemas import FaultMessage, Page
from api.webhook_schemas import Delivery, NewWebhook, SecretRotation, Webhook, WebhookBody, WebhookChange
from store import audit, webhooks
from store.webhook_hosts import parse_target, problem_with
from store.webhook_queue import send_again
from store.webhook_tables import Webhook as WebhookRow
from store.webhook_tables import WebhookDelivery, WebhookEvent
from store.webhooks import WebhookStanding

router = APIRouter(prefix="/v1/webhooks", tags=["webhooks"])


@router.get("", openapi_extra=least("admin"))
def list_webhooks(database: Database) -> Page[Webhook]:
    """All webhooks, the newest first, without their secrets."""
    return Page[Webhook](items=[_message(standing) for standing in webhooks.standings(database)])


@router.post("", status_code=201, openapi_extra=least("admin"))
def create_webhook(
    body: WebhookBody, database: Database, settings: Settings, who: Who, response: Response
) -> NewWebhook:
    """Have an address told of events. The secret that signs its messages is in this answer and never again."""
    _check_url(body.url, settings)
    row = webhooks.create_webhook(
        database, name=body.name, url=body.url, events=sorted(set(body.events)), created_by=who.name
    )
    audit.record(database, who.name, "webhook.create", row.id, host=_host(row.url), events=row.events)
    message = NewWebhook(**_one(database, row.id).model_dump(), secret=row.secret)
    database.commit()
    response.headers["Location"] = f"/v1/webhooks/{row.id}"
    return message


@router.get("/{webhook_id}", openapi_extra=least("admin"))
def read_webhook(webhook_id: str, database: Database) -> Webhook:
    """One webhook."""
    return _one(database, webhook_id)


@router.patch("/{webhook_id}", openapi_extra=least("admin"))
def update_webhook(webhook_id: str, body: WebhookChange, database: Database, settings: Settings, who: Who) -> Webhook:
    """Change a webhook, or switch it off or on."""
    row = _locked(database, webhook_id)
    if body.url is not None:
        _check_url(body.url, settings)
    asked = body.model_dump(exclude_none=True)
    webhooks.change_webhook(database, row, **asked)
    told = {**asked, "host": _host(row.url)}
    told.pop("url", None)
    audit.record(database, who.name, "webhook.change", row.id, **told)
    message = _one(database, webhook_id)
    database.commit()
    return message


@router.post("/{webhook_id}/rotate-secret", openapi_extra=least("admin"))
def rotate_webhook_secret(webhook_id: str, body: SecretRotation, database: Database, who: Who) -> NewWebhook:
    """Give a webhook another secret. For a while messages bear two signatures, of the new one and of the old one.

    The new secret is in this answer and never again. 409 while too many earlier ones still sign.
    """
    row = _locked(database, webhook_id)
    try:
        webhooks.rotate_secret(database, row, timedelta(seconds=body.overlap_s))
    except webhooks.TooManySecretsError as error:
        raise ProblemError(
            409, "too_many_secrets", f"{error}: wait, or end them all now with an overlap of 0."
        ) from error
    audit.record(database, who.name, "webhook.rotate_secret", row.id, overlap_s=body.overlap_s)
    message = NewWebhook(**_one(database, row.id).model_dump(), secret=row.secret)
    database.commit()
    return message


@router.delete("/{webhook_id}", status_code=204, openapi_extra=least("admin"))
def delete_webhook(webhook_id: str, database: Database, who: Who) -> None:
    """Remove a webhook; what waits for it is not sent."""
    row = _locked(database, webhook_id)
    audit.record(database, who.name, "webhook.delete", row.id, host=_host(row.url))
    webhooks.delete_webhook(database, row)
    database.commit()


@router.post("/{webhook_id}/test", status_code=202, openapi_extra=least("admin"))
def send_test_message(webhook_id: str, database: Database, who: Who) -> Delivery:
    """Send it a message of the type `webhook.test`. 409 while it is switched off."""
    row = _locked(database, webhook_id)
    if not row.enabled:
        raise ProblemError(409, "webhook_disabled", f"{row.name} is switched off: switch it on first.")
    delivery, event = webhooks.send_test(database, row)
    audit.record(database, who.name, "webhook.test", row.id, event=event.id)
    message = _delivery(delivery, event)
    database.commit()
    return message


@router.get("/{webhook_id}/deliveries", openapi_extra=least("admin"))
def list_deliveries(
    webhook_id: str,
    database: Database,
    cursor: Annotated[str | None, Query(max_length=200)] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> Page[Delivery]:
    """Its messages of the last 30 days, the newest first."""
    _one(database, webhook_id)
    before = cursors.decode_time_and_id(cursor) if cursor else None
    found = webhooks.list_deliveries(database, webhook_id, before=before, limit=limit + 1)
    more, found = len(found) > limit, found[:limit]
    last = found[-1][0] if more else None
    return Page[Delivery](
        items=[_delivery(*pair) for pair in found],
        next=cursors.encode(last.created_at.isoformat(), last.id) if last else None,
    )


@router.post("/{webhook_id}/deliveries/{delivery_id}/redeliver", status_code=202, openapi_extra=least("admin"))
def redeliver(webhook_id: str, delivery_id: str, database: Database, who: Who) -> Delivery:
    """Send a message once more, under its old id and with a whole budget of attempts."""
    row = _locked(database, webhook_id)
    found = webhooks.find_delivery(database, webhook_id, delivery_id)
    if found is None:
        raise not_found("delivery", delivery_id)
    if not row.enabled:
        raise ProblemError(409, "webhook_disabled", f"{row.name} is switched off: switch it on first.")
    send_again(database, found[0])
    audit.record(database, who.name, "webhook.redeliver", row.id, delivery=delivery_id)
    database.commit()
    return _delivery(*found)


def _check_url(url: str, settings: Settings) -> None:
    problem = problem_with(url, settings.webhook_hosts)
    if problem is not None:
        fault = FaultMessage(pointer="/url", message=problem)
        raise ProblemError(422, "bad_request", "The request is not valid.", errors=[fault])


def _host(url: str) -> str:
    """What of an address is no secret: many receivers have theirs in the path or query."""
    return parse_target(url).endpoint.authority


def _locked(database: Database, webhook_id: str) -> WebhookRow:
    row = webhooks.locked_webhook(database, webhook_id)
    if row is None:
        raise not_found("webhook", webhook_id)
    return row


def _one(database: Database, webhook_id: str) -> Webhook:
    found = webhooks.standings(database, [webhook_id])
    if not found:
        raise not_found("webhook", webhook_id)
    return _message(found[0])


def _message(standing: WebhookStanding) -> Webhook:
    row = standing.webhook
    derived = {
        "pending": standing.pending,
        "dead": standing.dead,
        "old_secrets_until": webhooks.old_secrets_until(row),
    }
    return Webhook(**{name: getattr(row, name) for name in Webhook.model_fields.keys() - derived.keys()}, **derived)


def _delivery(row: WebhookDelivery, event: WebhookEvent) -> Delivery:
    derived = {"event", "next_attempt_at"}
    return Delivery(
        **{name: getattr(row, name) for name in Delivery.model_fields.keys() - derived},
        event=event.type,
        next_attempt_at=row.next_attempt_at if row.status == "pending" else None,
    )
