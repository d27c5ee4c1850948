"""Which events of a checkpoint a terminal shows."""

from __future__ import annotations

from typing import Any

import pytest

from ppo.run_view import event_line

SAVED = {"path": "segment-0001/checkpoints/iter-000020", "reason": "schedule"}


@pytest.mark.parametrize(
    ("payload", "line"),
    [
        ({}, "checkpoint segment-0001/checkpoints/iter-000020 (schedule)"),
        (
            {"change": "damaged", "status_detail": "state.json is missing"},
            "checkpoint segment-0001/checkpoints/iter-000020 damaged: state.json is missing",
        ),
        ({"change": "pinned", "status_detail": None}, "checkpoint segment-0001/checkpoints/iter-000020 pinned"),
        ({"change": "removed", "status_detail": "no rule keeps it"}, None),
    ],
)
def test_a_removal_by_the_rules_is_no_news_and_damage_is(payload: dict[str, Any], line: str | None) -> None:
    assert event_line("checkpoint", {**SAVED, **payload}) == line


@pytest.mark.parametrize(
    ("status", "line"),
    [
        ("raised", "▲ warning: Answers grow. Raise kl.coef."),
        ("escalated", "▲ warning: Answers grow. Raise kl.coef."),
        ("cleared", "alert cleared: Answers grow"),
    ],
)
def test_an_alert_is_told_with_what_to_do(status: str, line: str) -> None:
    payload = {"status": status, "severity": "warning", "title": "Answers grow", "remedy": "Raise kl.coef."}
    assert event_line("alert", payload) == line
