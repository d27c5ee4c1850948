"""Alerts over REST: lists, counts, acknowledging and snoozing, and a way back that can be posted as it is."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker
from starlette.testclient import TestClient

from api.settings import ApiSettings
from store.alerts import take_news
from store.events import append_event
from store.models import AuditEntry, Checkpoint, Run
from tests.alert_news import news
from tests.api.checkpoint_files import SavedRun


@pytest.fixture
def raise_alert(sessions: sessionmaker[Session]) -> Callable[..., str]:
    """Store an alert of a run as its journal would; returns its id."""

    def store(run_id: str, iteration: int = 8, **fields: Any) -> str:
        with sessions.begin() as session:
            run = session.get_one(Run, run_id)
            return take_news(session, run, 1, iteration, datetime.now(UTC), news(**fields)).id

    return store


def test_lists_are_filtered_and_paged(
    viewer: TestClient, make_run: Callable[..., str], raise_alert: Callable[..., str]
) -> None:
    run, other = make_run(name="mine"), make_run()
    first = raise_alert(run)
    second = raise_alert(run, rule="story:length_hacking", severity="critical", kind="story")
    third = raise_alert(other)
    raise_alert(run, 9, status="cleared")

    def ids(path: str, **params: Any) -> list[str]:
        found = []
        while True:
            page = viewer.get(path, params=params).json()
            found += [item["id"] for item in page["items"]]
            if page["next"] is None:
                return found
            params["cursor"] = page["next"]

    assert [one for one in ids("/v1/alerts", limit=1) if one in (first, second, third)] == [third, second, first]
    assert ids(f"/v1/runs/{run}/alerts") == ids("/v1/alerts", run=run) == [second, first]
    assert ids("/v1/alerts", run=run, status="cleared") == [first]
    assert ids("/v1/alerts", run=run, severity="critical", status=["open", "cleared"]) == [second]
    one = viewer.get(f"/v1/alerts/{second}").json()
    assert (one["run_name"], one["status"], one["title"]) == ("mine", "open", news()["title"])
    assert one["snapshot"]["kl/ref_sequence"][0] == [1, 1.5]
    assert one["evidence"][0]["then"] == 4.1
    assert viewer.get("/v1/runs/r-none/alerts").status_code == 404
    assert (
        viewer.get("/v1/alerts", params={"status": "loud"}).json()["errors"][0]["pointer"].startswith("/query/status")
    )


def test_a_run_counts_its_open_alerts(
    operator: TestClient, make_run: Callable[..., str], raise_alert: Callable[..., str]
) -> None:
    run = make_run()
    assert operator.get(f"/v1/runs/{run}").json()["alerts"] == {"warning": 0, "critical": 0, "snoozed": 0}
    quiet = raise_alert(run)
    raise_alert(run, rule="band:one")
    raise_alert(run, rule="band:two", severity="critical")
    operator.post(f"/v1/alerts/{quiet}/snooze", json={"seconds": 60})
    assert operator.get(f"/v1/runs/{run}").json()["alerts"] == {"warning": 1, "critical": 1, "snoozed": 1}
    listed = operator.get("/v1/runs", params={"match": run}).json()["items"]
    assert listed[0]["alerts"]["critical"] == 1


def test_acknowledging_and_snoozing_are_kept_told_and_audited(
    operator: TestClient,
    viewer: TestClient,
    make_run: Callable[..., str],
    raise_alert: Callable[..., str],
    sessions: sessionmaker[Session],
) -> None:
    alert = raise_alert(run := make_run())
    assert viewer.post(f"/v1/alerts/{alert}/ack").status_code == 403
    for _ in range(2):
        answer = operator.post(f"/v1/alerts/{alert}/ack").json()
    assert answer["acknowledged_by"] == "the operator"
    until = datetime.now(UTC) + timedelta(hours=1)
    assert operator.post(f"/v1/alerts/{alert}/snooze", json={"until": until.isoformat()}).json()["snoozed"] is True
    ended = operator.post(f"/v1/alerts/{alert}/snooze", json={"seconds": 0}).json()
    assert (ended["snoozed"], ended["snoozed_until"]) == (False, None)
    told = [event for event in viewer.get(f"/v1/runs/{run}/events").json()["items"] if event["type"] == "alert"]
    assert [event["payload"]["status"] for event in told] == ["acknowledged", "snoozed", "unsnoozed"]
    assert {event["actor"] for event in told} == {"the operator"}
    with sessions() as session:
        actions = session.scalars(select(AuditEntry.action).where(AuditEntry.target == alert)).all()
    assert actions == ["alert.ack", "alert.snooze", "alert.snooze"]


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({}, "either `until`"),
        ({"seconds": 60, "until": "2030-01-01T00:00:00Z"}, "either `until`"),
        ({"until": "2030-01-01T00:00:00"}, "zone"),
        ({"until": "2020-01-01T00:00:00Z"}, "30 days"),
        ({"seconds": -1}, "greater"),
        ({"seconds": 10**9}, "less"),
        ({"for": 60}, "unknown field"),
    ],
)
def test_a_snooze_that_makes_no_sense_is_refused_with_a_remedy(
    body: dict[str, Any], word: str, operator: TestClient, make_run: Callable[..., str], raise_alert: Callable[..., str]
) -> None:
    answer = operator.post(f"/v1/alerts/{raise_alert(make_run())}/snooze", json=body)
    assert answer.status_code == 422
    assert any(word in fault["message"] for fault in answer.json()["errors"]), answer.json()


@pytest.mark.parametrize("changes", [{"kl.coef": 0.1}, {}])
def test_the_suggested_way_back_is_posted_as_it_is(
    changes: dict[str, float],
    operator: TestClient,
    submit: Callable[..., dict[str, Any]],
    raise_alert: Callable[..., str],
    sessions: sessionmaker[Session],
    settings: ApiSettings,
) -> None:
    run = submit()["id"]
    saved = SavedRun(sessions, settings.data_dir / "runs" / run, run)
    for iteration in (4, 8):
        saved.save(iteration)
    suggestion = {"checkpoint": "1:4", "changes": changes, "reason": "KL ran away"}
    alert = raise_alert(run, onset=6, suggestion=suggestion)
    found = operator.get(f"/v1/alerts/{alert}").json()["suggestion"]
    assert (found["segment"], found["iteration"], found["changes"]) == (1, 4, changes)
    etag = operator.get(f"/v1/runs/{run}").headers["ETag"]
    headers = {"Idempotency-Key": uuid4().hex, "If-Match": etag}
    answer = operator.post(f"/v1/runs/{run}/rollback", json=found["rollback"], headers=headers)
    assert answer.status_code == 202, answer.text
    with sessions.begin() as session:
        for row in session.scalars(select(Checkpoint).where(Checkpoint.run_id == run)):
            row.status = "damaged"
    nothing = operator.get(f"/v1/alerts/{alert}").json()["suggestion"]
    assert (nothing["rollback"], nothing["changes"]) == (None, changes)


def test_the_preflight_is_what_the_journal_told_last(
    viewer: TestClient, make_run: Callable[..., str], sessions: sessionmaker[Session]
) -> None:
    run = make_run()
    assert viewer.get(f"/v1/runs/{run}/preflight").json() == {
        "time": None, "segment": None, "findings": [], "numbers": {},
    }  # fmt: skip
    good = {"check": "eos", "status": "warning", "detail": "EOS is never reached", "remedy": "raise max_new_tokens"}
    with sessions.begin() as session:
        append_event(session, run, "preflight", {"findings": [], "numbers": {}}, segment=1, iteration=0)
        findings = [good, {"check": "odd", "status": "unheard of"}, "odd"]
        append_event(session, run, "preflight", {"findings": findings, "numbers": {"steps": 8}}, segment=1)
    answer = viewer.get(f"/v1/runs/{run}/preflight").json()
    assert (answer["findings"], answer["numbers"], answer["segment"]) == ([good], {"steps": 8}, 1)
