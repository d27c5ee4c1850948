"""Alerts, alert rules and webhooks of a platform, as `Client.alerts`, `Client.alert_rules` and `Client.webhooks`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, cast
from urllib.parse import quote

from ppo.connection import Connection
from ppo.wire import Alert, AlertDetail, AlertRules, AlertStatus, Delivery, NewWebhook, Preflight, Severity, Webhook


class Alerts:
    """What trainers noticed, and what people say about it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def list(
        self,
        *,
        run_id: str | None = None,
        statuses: Sequence[AlertStatus] = (),
        severities: Sequence[Severity] = (),
    ) -> Iterator[Alert]:
        """Alerts, the last raised first, all pages: of one run or of all."""
        params = {"run": run_id, "status": list(statuses), "severity": list(severities)}
        return cast(Iterator[Alert], self._connection.pages("/v1/alerts", params))

    def get(self, alert_id: str) -> AlertDetail:
        """One alert, with its metrics around the moment."""
        return cast(AlertDetail, self._connection.get(_alert(alert_id)))

    def ack(self, alert_id: str) -> Alert:
        """Say that somebody has seen it."""
        return cast(Alert, self._connection.once("POST", f"{_alert(alert_id)}/ack"))

    def snooze(self, alert_id: str, *, seconds: int | None = None, until: datetime | None = None) -> Alert:
        """Hear nothing of it for some seconds, or until a time with its zone; 0 seconds ends a snooze."""
        body = {"seconds": seconds} if until is None else {"until": until.isoformat()}
        return cast(Alert, self._connection.once("POST", f"{_alert(alert_id)}/snooze", json=body))

    def preflight(self, run_id: str) -> Preflight:
        """What was checked before the run's first iteration."""
        return cast(Preflight, self._connection.get(f"/v1/runs/{quote(run_id, safe='')}/preflight"))


class PlatformAlertRules:
    """What submitted specs take for the fields of `alerts` that they leave out. Changing it needs an admin's key."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def get(self) -> AlertRules:
        """The rules as they are: a part of a spec's `alerts` group, no defaults."""
        return cast(AlertRules, self._connection.get("/v1/alert-rules"))

    def put(self, alerts: Mapping[str, Any], *, version: int | None = None) -> AlertRules:
        """Put other rules in their place, whole. With `version` only as they were when they were looked at.

        Raises:
            RequestError: 412, they were changed since; 422, with every fault of the rules.
        """
        seen = self.get()["version"] if version is None else version
        headers = {"If-Match": f'"{seen}"'}
        return cast(
            AlertRules, self._connection.once("PUT", "/v1/alert-rules", json={"alerts": alerts}, headers=headers)
        )


class Webhooks:
    """Who is told what happens. All of it needs an admin's key."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def list(self) -> list[Webhook]:
        """All webhooks, the newest first."""
        return cast("list[Webhook]", self._connection.get("/v1/webhooks")["items"])

    def create(self, name: str, url: str, events: Sequence[str] | None = None) -> NewWebhook:
        """A new webhook; its `secret` is in this answer and never again."""
        body: dict[str, Any] = {"name": name, "url": url}
        if events is not None:
            body["events"] = [*events]
        return cast(NewWebhook, self._connection.once("POST", "/v1/webhooks", json=body))

    def change(self, webhook_id: str, fields: Mapping[str, Any]) -> Webhook:
        """Change `name`, `url`, `events` or `enabled`."""
        return cast(Webhook, self._connection.once("PATCH", _webhook(webhook_id), json=fields))

    def rotate_secret(self, webhook_id: str, overlap_s: int = 86_400) -> NewWebhook:
        """Give it another `secret`, in this answer and never again; the old one signs beside it for `overlap_s`."""
        path = f"{_webhook(webhook_id)}/rotate-secret"
        return cast(NewWebhook, self._connection.once("POST", path, json={"overlap_s": overlap_s}))

    def delete(self, webhook_id: str) -> None:
        """Remove it; what waits for it is not sent."""
        self._connection.once("DELETE", _webhook(webhook_id))

    def test(self, webhook_id: str) -> Delivery:
        """Send it a message of the type `webhook.test`."""
        return cast(Delivery, self._connection.once("POST", f"{_webhook(webhook_id)}/test"))

    def deliveries(self, webhook_id: str) -> Iterator[Delivery]:
        """Its messages of the last 30 days, the newest first, all pages."""
        return cast(Iterator[Delivery], self._connection.pages(f"{_webhook(webhook_id)}/deliveries", {}))

    def redeliver(self, webhook_id: str, delivery_id: str) -> Delivery:
        """Send a message once more under its old id."""
        path = f"{_webhook(webhook_id)}/deliveries/{quote(delivery_id, safe='')}/redeliver"
        return cast(Delivery, self._connection.once("POST", path))


def _alert(alert_id: str) -> str:
    return f"/v1/alerts/{quote(alert_id, safe='')}"


def _webhook(webhook_id: str) -> str:
    return f"/v1/webhooks/{quote(webhook_id, safe='')}"
