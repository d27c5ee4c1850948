"""What travels over REST about webhooks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from api.schemas import Body, Message, Time

WebhookEventType = Literal["alert.raised", "alert.escalated", "alert.cleared", "run.state"]
Name = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]+$")]
Url = Annotated[str, StringConstraints(min_length=1, max_length=2000)]
EventTypes = Annotated[list[WebhookEventType], Field(min_length=1, max_length=4)]


class WebhookBody(Body):
    """A new webhook."""

    name: Name
    url: Url = Field(description="http or https, of a host in PPO_WEBHOOK_HOSTS.")
    events: EventTypes = Field(
        ["alert.raised", "alert.escalated", "alert.cleared", "run.state"], description="What it is told of."
    )


class WebhookChange(Body):
    """What to change of a webhook; the rest stays."""

    name: Name | None = None
    url: Url | None = None
    events: EventTypes | None = None
    enabled: bool | None = Field(None, description="False gives up what waits for it.")


class SecretRotation(Body):
    """How a webhook gets another secret."""

    overlap_s: int = Field(
        86_400,
        ge=0,
        le=7 * 86_400,
        description="Seconds for which the present secret signs beside the new one; 0 ends it and all earlier ones.",
    )


class Webhook(Message):
    """An address that is told what happens, without its secret."""

    id: str
    name: str
    url: str
    events: list[WebhookEventType]
    enabled: bool
    disabled_reason: str | None
    created_by: str | None
    created_at: Time
    old_secrets_until: Time | None = Field(description="Until then an earlier secret signs beside the present one.")
    pending: int = Field(description="Messages that wait.")
    dead: int = Field(description="Messages that were given up, of the last 30 days.")


class NewWebhook(Webhook):
    """A webhook with the secret that was just made; it is shown this once."""

    secret: str = Field(description="whsec_ and the signing key in base64, as Standard Webhooks has it.")


class Delivery(Message):
    """One message to a webhook."""

    id: str
    event_id: str = Field(description="What the receiver sees as webhook-id, in every attempt.")
    event: str
    status: Literal["pending", "delivered", "dead"]
    attempts: int
    next_attempt_at: Time | None = Field(description="Null unless it is pending.")
    last_status: int | None = Field(description="HTTP status of the last attempt's answer, if there was one.")
    last_error: str | None
    created_at: Time
    finished_at: Time | None
