"""The platform's own alert rules: read and changed. Nothing here commits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import func
from sqlalchemy.orm import Session

from store import audit
from store.alert_rule_tables import AlertRules

ROW = 1


def current_rules(session: Session) -> AlertRules:
    """The rules as they are."""
    return session.get_one(AlertRules, ROW, populate_existing=True)


def locked_rules(session: Session) -> AlertRules:
    """The rules as they are, locked until the commit."""
    return session.get_one(AlertRules, ROW, with_for_update=True, populate_existing=True)


def change_rules(session: Session, rules: AlertRules, alerts: Mapping[str, Any], changed_by: str) -> None:
    """Put checked rules in the place of those that are there, with an audit entry. The same again changes nothing."""
    if rules.alerts == alerts:
        return
    before = rules.alerts
    rules.alerts, rules.version = dict(alerts), rules.version + 1
    rules.changed_by, rules.changed_at = changed_by, func.now()
    session.flush()
    session.refresh(rules)
    audit.record(
        session,
        changed_by,
        "alert_rules.change",
        "alert-rules",
        version=rules.version,
        before=before,
        after=rules.alerts,
    )
