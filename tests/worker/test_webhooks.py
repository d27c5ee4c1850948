"""Messages to webhooks through the real reconciler's process: at least once, under one id, until the budget is used."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from store import webhooks
from store.alerts import take_news
from store.models import Run
from store.webhook_queue import send_again
from store.webhook_tables import Webhook, WebhookDelivery
from tests.alert_news import news
from tests.worker.platform import Platform, wait_until
from tests.worker.webhook_receiver import Receiver, webhook_receiver

pytestmark = pytest.mark.stack

PATIENCE_S = 60


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with webhook_receiver() as found:
        yield found


@pytest.fixture
def platform(database_url: str, tmp_path: Path) -> Iterator[Platform]:
    settings = {
        "PPO_WEBHOOK_HOSTS": "127.0.0.1",
        "PPO_WEBHOOK_TIMEOUT_S": "1",
        "PPO_WEBHOOK_FIRST_WAIT_S": "0.2",
        "PPO_WEBHOOK_ATTEMPTS": "3",
    }
    with Platform(database_url, tmp_path, settings) as found:
        yield found


def register(platform: Platform, url: str, *events: str) -> Webhook:
    with platform.sessions.begin() as session:
        return webhooks.create_webhook(session, name="here", url=url, events=events, created_by="ada")


def alert(platform: Platform, run_id: str, **fields: Any) -> None:
    with platform.sessions.begin() as session:
        take_news(session, session.get_one(Run, run_id), 1, 8, datetime.now(UTC), news(**fields))


def deliveries(platform: Platform, webhook: Webhook) -> list[WebhookDelivery]:
    with platform.sessions() as session:
        return list(session.scalars(select(WebhookDelivery).where(WebhookDelivery.webhook_id == webhook.id)))


def test_a_kill_between_sending_and_marking_sends_again_under_the_same_id(
    platform: Platform, receiver: Receiver
) -> None:
    webhook = register(platform, receiver.url, "alert.raised", "run.state")
    receiver.secret = webhook.secret
    run_id = platform.submit()
    first = platform.start("worker.reconcile")
    wait_until(lambda: [got.message["type"] for got in receiver.requests] == ["run.state"], PATIENCE_S)

    def kill_once(_: object) -> tuple[int, dict[str, str]]:
        if first.poll() is None:
            os.kill(first.pid, signal.SIGKILL)
            first.wait()
        return 204, {}

    receiver.reply = kill_once
    alert(platform, run_id)
    wait_until(lambda: first.poll() is not None, PATIENCE_S)
    assert [one.status for one in deliveries(platform, webhook)].count("pending") == 1
    platform.start("worker.reconcile")
    wait_until(lambda: all(one.status == "delivered" for one in deliveries(platform, webhook)), PATIENCE_S)
    sent = [got for got in receiver.requests if got.message["type"] == "alert.raised"]
    assert len(sent) == 2
    assert sent[0] == sent[1]
    known = [got for got in receiver.known.values() if got.message["type"] == "alert.raised"]
    assert len(known) == 1
    assert all(got.signed for got in receiver.requests)
    told = known[0].message["data"]
    assert (told["run"]["id"], told["alert"]["rule"], told["alert"]["severity"]) == (
        run_id, "band:kl/ref_sequence", "warning",
    )  # fmt: skip


def test_failures_are_tried_again_then_dead_and_a_hanging_receiver_holds_nobody_up(
    platform: Platform, receiver: Receiver
) -> None:
    with webhook_receiver() as hanging, webhook_receiver() as gone:
        hanging.reply = lambda _: None
        gone.reply = lambda _: (410, {})
        receiver.reply = lambda _: (204 if len(receiver.requests) == 2 else 503, {})
        hooks = [register(platform, one.url, "alert.raised") for one in (hanging, gone, receiver)]
        run_id = platform.submit()
        platform.start("worker.reconcile")
        alert(platform, run_id)

        def standing() -> list[tuple[str, int]]:
            found = [deliveries(platform, hook)[0] for hook in hooks]
            return [(one.status, one.attempts) for one in found]

        wait_until(lambda: standing() == [("dead", 3), ("dead", 1), ("delivered", 2)], PATIENCE_S)
        assert len({got.id for one in (hanging, gone, receiver) for got in one.requests}) == 1
        with platform.sessions() as session:
            assert [session.get_one(Webhook, hook.id).enabled for hook in hooks] == [True, False, True]
        assert "no answer" in (deliveries(platform, hooks[0])[0].last_error or "")

        hanging.reply = lambda _: (204, {})
        with platform.sessions.begin() as session:
            send_again(session, session.get_one(WebhookDelivery, deliveries(platform, hooks[0])[0].id))
        wait_until(lambda: standing()[0] == ("delivered", 1), PATIENCE_S)
        assert len(hanging.known) == 1
