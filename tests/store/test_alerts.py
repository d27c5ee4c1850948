"""Alerts come once, stand as the run's active line says, and hold the checkpoint before their onset."""

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from ppo_core.rundir import SegmentStart, create_segment
from store import alerts, retention, workers
from store.alert_tables import Alert
from store.alerts import OpenCounts, acknowledge, open_counts, settle_alerts, snooze
from store.models import Checkpoint, Run, RunEvent, Segment
from store.queue import claim
from store.runs import ForkStart, create_run
from store.webhook_tables import Webhook, WebhookEvent
from tests.alert_news import news
from tests.ppo_core.diagnostics.made_runs import alerts_of, made_spec, watch_of
from tests.ppo_core.diagnostics.test_stories import long_and_cut
from tests.store.test_journal import Attempt


@pytest.fixture
def attempt(session: Session, make_run: Callable[..., Run], tmp_path: Path) -> Attempt:
    run = make_run()
    workers.register(session, worker_id="w", host="h", pid=1, cpu_slots=1, gpus=0, version="0", data_token="t")
    assert claim(session, "w", 20) is not None
    session.add(Webhook(id="h-1", name="all", url="https://example.org/", secret="s", events=list(EVENTS)))
    return Attempt(session, run, create_segment(tmp_path / run.id, SegmentStart(run.id, 1, {"seed": 1})))


EVENTS = ("alert.raised", "alert.escalated", "alert.cleared")


def tell(attempt: Attempt, iteration: int, **fields: Any) -> None:
    attempt.journal.append("alert", iteration, news(**fields))
    attempt.deliver()


def rows(attempt: Attempt) -> list[Alert]:
    statement = select(Alert).where(Alert.run_id == attempt.run.id).order_by(Alert.segment, Alert.iteration, Alert.rule)
    return list(attempt.session.scalars(statement))


def told(attempt: Attempt) -> list[str]:
    events = attempt.session.scalars(select(WebhookEvent).order_by(WebhookEvent.time)).all()
    return sorted(event.type for event in events if event.data["run"]["id"] == attempt.run.id)


def checkpoint(attempt: Attempt, iteration: int, segment: int = 1) -> Checkpoint:
    row = Checkpoint(
        id=f"k-{segment}-{iteration}", run_id=attempt.run.id, segment=segment, iteration=iteration, bytes=1,
        path=f"segment-000{segment}/checkpoints/iter-{iteration:06d}", manifest_sha256="0", reason="schedule",
        lease_token=1,
    )  # fmt: skip
    attempt.session.add(row)
    attempt.session.flush()
    return row


def go_back(attempt: Attempt, number: int, target: Checkpoint) -> None:
    segment = Segment(
        run_id=attempt.run.id, number=number, kind="rollback", spec={}, start_iteration=target.iteration,
        start_checkpoint=target.id,
    )  # fmt: skip
    attempt.session.add(segment)
    attempt.run.active_segment = number
    attempt.session.flush()
    settle_alerts(attempt.session, attempt.run.id)


def test_an_alert_is_raised_escalates_and_clears_in_one_row(attempt: Attempt) -> None:
    tell(attempt, 8)
    tell(attempt, 9, status="escalated", severity="critical", title="worse", value=20.0)
    (alert,) = rows(attempt)
    assert (alert.status, alert.severity, alert.title, alert.value) == ("open", "critical", "worse", 20.0)
    assert (alert.iteration, alert.onset, alert.segment) == (8, 6, 1)
    tell(attempt, 12, status="cleared", severity="critical")
    (alert,) = rows(attempt)
    assert (alert.status, alert.cleared_iteration, alert.title) == ("cleared", 12, "worse")
    assert told(attempt) == ["alert.cleared", "alert.escalated", "alert.raised"]
    assert [event["status"] for event in attempt.events("alert")] == ["raised", "escalated", "cleared"]
    assert {event["alert_id"] for event in attempt.events("alert")} == {alert.id}


def test_delivering_twice_tells_nothing_twice(attempt: Attempt) -> None:
    tell(attempt, 8)
    attempt.deliver(offset=0)
    assert (len(rows(attempt)), told(attempt), len(attempt.events("alert"))) == (1, ["alert.raised"], 1)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"severity": "bad"}, "severity"),
        ({"onset": -1}, "onset"),
        ({"snapshot": []}, "snapshot"),
        ({"rule": ""}, "rule"),
    ],
)
def test_a_line_that_breaks_the_contract_is_a_note_and_holds_nothing_up(
    attempt: Attempt, fields: dict[str, Any], word: str
) -> None:
    attempt.journal.append("alert", 8, {**news(), **fields})
    tell(attempt, 9, raised=9)
    assert [alert.iteration for alert in rows(attempt)] == [9]
    assert word in attempt.events("note")[0]["message"]


def test_numbers_that_are_none_and_odd_texts_are_kept_as_nothing(attempt: Attempt) -> None:
    tell(attempt, 8, value=math.nan, bound=None, title="a\0b\ud800")
    (alert,) = rows(attempt)
    assert (alert.value, alert.bound, alert.title) == (None, None, "a\u2400b\ufffd")


def test_going_back_leaves_an_alert_and_going_back_again_opens_it(attempt: Attempt) -> None:
    before, after = checkpoint(attempt, 5), checkpoint(attempt, 10)
    tell(attempt, 8)
    go_back(attempt, 2, before)
    assert [alert.status for alert in rows(attempt)] == ["left"]
    assert told(attempt) == ["alert.cleared", "alert.raised"]
    go_back(attempt, 3, after)
    assert [alert.status for alert in rows(attempt)] == ["open"]
    assert told(attempt) == ["alert.cleared", "alert.raised", "alert.raised"]


def test_an_alert_clears_in_a_later_segment_and_is_open_again_where_that_is_left(attempt: Attempt) -> None:
    start = checkpoint(attempt, 10)
    tell(attempt, 8)
    go_back(attempt, 2, start)
    alerts.take_news(attempt.session, attempt.run, 2, 14, _now(), news(status="cleared"))
    (alert,) = rows(attempt)
    assert (alert.status, alert.segment, alert.cleared_iteration) == ("cleared", 1, 14)
    go_back(attempt, 3, start)
    assert (alert.status, alert.cleared_at) == ("open", None)


def test_the_same_alert_raised_again_after_going_back_is_another(attempt: Attempt) -> None:
    start = checkpoint(attempt, 5)
    tell(attempt, 8)
    go_back(attempt, 2, start)
    alerts.take_news(attempt.session, attempt.run, 2, 8, _now(), news())
    assert [(alert.segment, alert.status) for alert in rows(attempt)] == [(1, "left"), (2, "open")]


def test_what_a_left_segment_still_tells_is_kept_and_goes_to_nobody(attempt: Attempt) -> None:
    go_back(attempt, 2, checkpoint(attempt, 5))
    tell(attempt, 8)
    assert ([alert.status for alert in rows(attempt)], told(attempt)) == (["left"], [])


def test_a_snoozed_alert_is_sent_to_nobody_and_counted_apart(attempt: Attempt) -> None:
    tell(attempt, 8)
    (alert,) = rows(attempt)
    snooze(attempt.session, alert, _now(seconds=60), "ada")
    attempt.session.flush()
    tell(attempt, 9, status="escalated", severity="critical")
    assert told(attempt) == ["alert.raised"]
    assert open_counts(attempt.session, [attempt.run.id]) == {attempt.run.id: OpenCounts(0, 0, 1)}
    snooze(attempt.session, alert, None, "ada")
    attempt.session.flush()
    assert open_counts(attempt.session, [attempt.run.id]) == {attempt.run.id: OpenCounts(0, 1, 0)}


def test_the_first_who_acknowledges_is_kept_and_the_history_says_so(attempt: Attempt) -> None:
    tell(attempt, 8)
    (alert,) = rows(attempt)
    for actor in ("ada", "bob"):
        acknowledge(attempt.session, alert, actor)
    events = attempt.session.scalars(select(RunEvent).where(RunEvent.type == "alert").order_by(RunEvent.seq)).all()
    assert alert.acknowledged_by == "ada"
    assert [(event.payload["status"], event.actor) for event in events] == [("raised", None), ("acknowledged", "ada")]


def test_the_checkpoint_before_the_onset_stays_while_the_alert_is_open(attempt: Attempt) -> None:
    for iteration in (2, 4, 6, 8, 10):
        checkpoint(attempt, iteration).verified_at = _now()
    rules = retention.rules_of({"checkpoints": {"keep_last": 1, "keep_best": 0}})

    def kept() -> dict[int, str]:
        found = retention.decide(attempt.session, attempt.run.id, rules)
        return {one.checkpoint.iteration: "; ".join(one.reasons) for one in found if one.stays}

    tell(attempt, 8, onset=7)
    assert sorted(kept()) == [6, 10]
    assert "before the alert that began at iteration 7" in kept()[6]
    tell(attempt, 9, onset=7, status="cleared")
    assert sorted(kept()) == [10]


def test_a_suggestion_falls_back_to_the_newest_good_checkpoint_before_the_onset(attempt: Attempt) -> None:
    for iteration in (2, 4, 6):
        checkpoint(attempt, iteration)
    suggestion = {"checkpoint": "1:4", "changes": {"kl.coef": 0.1}, "reason": "KL ran away"}
    tell(attempt, 8, onset=6, suggestion=suggestion)
    alert = rows(attempt)[0]
    assert alerts.checkpoints_before(attempt.session, [alert])[alert.id].iteration == 4
    attempt.session.get_one(Checkpoint, "k-1-4").status = "damaged"
    attempt.session.flush()
    assert alerts.checkpoints_before(attempt.session, [alert])[alert.id].iteration == 2
    attempt.session.get_one(Checkpoint, "k-1-2").status = "removed"
    attempt.session.flush()
    assert alerts.checkpoints_before(attempt.session, [alert]) == {}


def test_a_fork_has_the_alerts_that_are_open_in_its_checkpoint(attempt: Attempt) -> None:
    tell(attempt, 3, rule="band:early", raised=3, onset=2)
    tell(attempt, 4, rule="band:early", raised=3, onset=2, status="cleared")
    tell(attempt, 8)
    source = checkpoint(attempt, 10)
    tell(attempt, 12, rule="band:late", raised=12, onset=11)
    fork = create_run(
        attempt.session, run_id="r-fork", name="fork", spec={}, num_iterations=20, priority=0, gpus=0,
        created_by="ada", fork=ForkStart(source.id, 10),
    )  # fmt: skip
    copies = list(attempt.session.scalars(select(Alert).where(Alert.run_id == fork.id)))
    assert [(copy.rule, copy.status, copy.iteration) for copy in copies] == [("band:kl/ref_sequence", "open", 8)]
    alerts.take_news(attempt.session, fork, 1, 14, _now(), news(status="cleared"))
    assert copies[0].status == "cleared"
    assert len(rows(attempt)) == 3


def test_what_the_trainers_own_watch_says_is_taken(attempt: Attempt) -> None:
    """A run whose answers grow with its score: bands and the story, and no line of it is refused."""
    watch = watch_of(made_spec(), lambda onset: ("1:80", 80))
    for payload in alerts_of(long_and_cut, iterations=200, watch=watch):
        attempt.journal.append("alert", payload["iteration"], payload)
    attempt.deliver()
    assert attempt.events("note") == []
    story = next(alert for alert in rows(attempt) if alert.rule == "story:length_hacking")
    assert story.suggestion is not None
    assert (story.suggestion["checkpoint"], bool(story.suggestion["changes"])) == ("1:80", True)


def _now(seconds: float = 0) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)
