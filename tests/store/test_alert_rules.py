"""The platform's alert rules are one row, whose changes are counted and audited."""

import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from store.alert_rules import change_rules, current_rules, locked_rules
from store.models import AuditEntry


def test_a_new_platform_has_no_rules(session: Session) -> None:
    rules = current_rules(session)
    assert (rules.alerts, rules.version, rules.changed_by, rules.changed_at) == ({}, 0, None, None)


def test_a_change_is_counted_and_audited_with_what_was_before(session: Session) -> None:
    for action in ("pause", "stop"):
        change_rules(session, locked_rules(session), {"on_critical": action}, "ada")
    rules = current_rules(session)
    assert (rules.alerts, rules.version, rules.changed_by) == ({"on_critical": "stop"}, 2, "ada")
    assert rules.changed_at is not None
    entries = session.scalars(select(AuditEntry).where(AuditEntry.action == "alert_rules.change")).all()
    assert [entry.detail for entry in entries] == [
        {"version": 1, "before": {}, "after": {"on_critical": "pause"}},
        {"version": 2, "before": {"on_critical": "pause"}, "after": {"on_critical": "stop"}},
    ]


def test_the_same_again_changes_nothing(session: Session) -> None:
    change_rules(session, locked_rules(session), {"on_critical": "pause"}, "ada")
    change_rules(session, locked_rules(session), {"on_critical": "pause"}, "bob")
    rules = current_rules(session)
    assert (rules.version, rules.changed_by) == (1, "ada")
    assert len(session.scalars(select(AuditEntry)).all()) == 1


def test_there_is_no_second_row(session: Session) -> None:
    with pytest.raises(IntegrityError, match="alert_rules_one_row"):
        session.execute(text("INSERT INTO alert_rules (id) VALUES (2)"))
