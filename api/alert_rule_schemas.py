"""What travels over REST about the platform's own alert rules."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from api.schemas import Body, Message, Time


class AlertRulesBody(Body):
    """The rules that are to stand, whole: what is left out is no rule any more."""

    alerts: dict[str, Any] = Field(
        description="A part of a spec's `alerts` group (see `/v1/spec/schema`): its fields, bands by metric."
    )


class AlertRules(Message):
    """The platform's own alert rules: what a submitted spec leaves out of its `alerts` group comes from here."""

    alerts: dict[str, Any] = Field(description="The fields of the group that are set, and no defaults.")
    version: int = Field(description="0 until the first change; in quotes it is the ETag.")
    changed_by: str | None
    changed_at: Time | None
