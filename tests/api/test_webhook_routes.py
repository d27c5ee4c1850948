"""Webhooks over REST: made by admins alone, secret shown once, hosts checked, messages listed and sent again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker
from starlette.testclient import TestClient

from store.models import AuditEntry
from store.webhook_queue import claim, mark_delivered, mark_failed
from store.webhook_tables import Webhook
from store.webhooks import send_test


@pytest.fixture
def create(admin: TestClient) -> Iterator[Callable[..., dict[str, Any]]]:
    """Webhooks for one test: those of another would be told of its runs, too."""
    ids: list[str] = []

    def post(**fields: Any) -> dict[str, Any]:
        answer = admin.post("/v1/webhooks", json={"name": "chat", "url": "https://hooks.example/in", **fields})
        assert answer.status_code == 201, answer.text
        made: dict[str, Any] = answer.json()
        ids.append(made["id"])
        return made

    yield post
    for webhook_id in ids:
        admin.delete(f"/v1/webhooks/{webhook_id}")


def test_the_secret_is_shown_once_and_never_audited(
    admin: TestClient, operator: TestClient, create: Callable[..., dict[str, Any]], sessions: sessionmaker[Session]
) -> None:
    made = create(events=["alert.raised"])
    assert made["secret"].startswith("whsec_")
    assert operator.post("/v1/webhooks", json={"name": "x", "url": "https://hooks.example/"}).status_code == 403
    rest = [admin.get("/v1/webhooks").text, admin.get(f"/v1/webhooks/{made['id']}").text]
    changed = admin.patch(f"/v1/webhooks/{made['id']}", json={"name": "other", "enabled": False})
    assert (changed.json()["name"], changed.json()["enabled"]) == ("other", False)
    with sessions() as session:
        rest += [str(row.detail) for row in session.scalars(select(AuditEntry).where(AuditEntry.target == made["id"]))]
    assert len(rest) == 4
    assert not any(made["secret"] in text for text in [*rest, changed.text])
    assert admin.delete(f"/v1/webhooks/{made['id']}").status_code == 204
    assert admin.get(f"/v1/webhooks/{made['id']}").status_code == 404


def secrets_of(sessions: sessionmaker[Session], webhook_id: str) -> tuple[str, ...]:
    """What a message that is sent now would be signed with."""
    with sessions.begin() as session:
        webhook = session.get_one(Webhook, webhook_id)
        send_test(session, webhook)
        message = claim(session, 5, [])
        assert message is not None
        mark_delivered(session, message.id, 204)
        return message.secrets


def test_a_new_secret_signs_beside_the_old_one_for_a_while(
    admin: TestClient, operator: TestClient, create: Callable[..., dict[str, Any]], sessions: sessionmaker[Session]
) -> None:
    first = create()
    assert first["old_secrets_until"] is None
    path = f"/v1/webhooks/{first['id']}/rotate-secret"
    assert operator.post(path, json={}).status_code == 403
    second = admin.post(path, json={}).json()
    ends_in = datetime.fromisoformat(second["old_secrets_until"]) - datetime.now(UTC)
    assert timedelta(hours=23, minutes=59) < ends_in <= timedelta(hours=24)
    assert second["secret"] != first["secret"]
    assert secrets_of(sessions, first["id"]) == (second["secret"], first["secret"])

    short = admin.post(path, json={"overlap_s": 1}).json()["secret"]
    assert secrets_of(sessions, first["id"]) == (short, second["secret"], first["secret"])
    time.sleep(1.1)
    assert secrets_of(sessions, first["id"]) == (short, first["secret"])

    last = admin.post(path, json={"overlap_s": 0}).json()
    assert last["old_secrets_until"] is None
    assert secrets_of(sessions, first["id"]) == (last["secret"],)
    with sessions() as session:
        audited = str([row.detail for row in session.scalars(select(AuditEntry))])
    told = [admin.get(f"/v1/webhooks/{first['id']}").text, admin.get("/v1/webhooks").text, audited]
    assert not any("whsec_" in text for text in told)


def test_too_many_secrets_at_once_are_refused_and_can_be_ended(
    admin: TestClient, create: Callable[..., dict[str, Any]]
) -> None:
    path = f"/v1/webhooks/{create()['id']}/rotate-secret"
    assert [admin.post(path, json={}).status_code for _ in range(5)] == [200, 200, 200, 200, 409]
    assert "overlap of 0" in admin.post(path, json={}).json()["detail"]
    assert admin.post(path, json={"overlap_s": -1}).status_code == 422
    assert admin.post(path, json={"overlap_s": 0}).status_code == 200
    assert admin.post(path, json={}).status_code == 200


@pytest.mark.parametrize(
    ("body", "pointer", "word"),
    [
        ({"url": "https://elsewhere.example/"}, "/url", "PPO_WEBHOOK_HOSTS"),
        ({"url": "http://169.254.169.254/"}, "/url", "PPO_WEBHOOK_HOSTS"),
        ({"url": "http://127.0.0.1:9001/"}, "/url", "PPO_WEBHOOK_HOSTS"),
        ({"url": "no address"}, "/url", "https://"),
        ({"events": []}, "/events", "at least 1"),
        ({"events": ["run.everything"]}, "/events/0", "alert.raised"),
        ({"name": "a\u0000b"}, "/name", "pattern"),
        ({"secret": "mine"}, "/secret", "unknown field"),
    ],
)
def test_bad_input_is_refused_with_field_and_remedy(
    body: dict[str, Any], pointer: str, word: str, admin: TestClient
) -> None:
    good = {"name": "chat", "url": "https://hooks.example/in"}
    answer = admin.post("/v1/webhooks", json={**good, **body})
    faults = {fault["pointer"]: fault["message"] for fault in answer.json()["errors"]}
    assert (answer.status_code, list(faults)) == (422, [pointer])
    assert word in faults[pointer]


def test_runs_that_change_state_are_told_and_messages_are_sent_again(
    admin: TestClient,
    create: Callable[..., dict[str, Any]],
    submit: Callable[..., dict[str, Any]],
    sessions: sessionmaker[Session],
) -> None:
    made, deaf = create(events=["run.state"]), create(events=["alert.raised"])
    run = submit()
    base = f"/v1/webhooks/{made['id']}"
    (waiting,) = admin.get(f"{base}/deliveries").json()["items"]
    assert (waiting["event"], waiting["status"], waiting["attempts"]) == ("run.state", "pending", 0)
    assert admin.get(f"/v1/webhooks/{deaf['id']}/deliveries").json()["items"] == []
    with sessions.begin() as session:
        message = claim(session, 60, [])
        assert message is not None
        assert run["id"].encode() in message.body
        assert claim(session, 60, []) is None
        mark_failed(session, message.id, "the receiver answered with status 500", 500, None)
    assert admin.get(base).json()["dead"] == 1
    again = admin.post(f"{base}/deliveries/{waiting['id']}/redeliver")
    assert (again.status_code, again.json()["status"], again.json()["event_id"]) == (
        202,
        "pending",
        waiting["event_id"],
    )
    test = admin.post(f"{base}/test").json()
    assert test["event"] == "webhook.test"
    pages = admin.get(f"{base}/deliveries", params={"limit": 1}).json()
    assert pages["items"][0]["id"] == test["id"]
    rest = admin.get(f"{base}/deliveries", params={"cursor": pages["next"]}).json()
    assert [one["id"] for one in rest["items"]] == [waiting["id"]]
    admin.patch(base, json={"enabled": False})
    assert [one["status"] for one in admin.get(f"{base}/deliveries").json()["items"]] == ["dead", "dead"]
    assert admin.post(f"{base}/test").status_code == 409
