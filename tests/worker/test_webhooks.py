"""Messages to webhooks through the real reconciler's process: at least once, under one id, until the budget is used."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from store import webhooks
from store.alerts import take_news
from store.models import Run
from store.webhook_queue import queue_message, send_again
from store.webhook_tables import Webhook, WebhookDelivery
from tests.alert_news import news
from tests.worker.platform import Platform, wait_until
from tests.worker.webhook_receiver import Receiver, webhook_receiver
from worker.settings import read_settings
from worker.webhook_post import Answer
from worker.webhooks import AT_ONCE, LOOK_EVERY_S, WebhookSender

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


def all_deliveries(platform: Platform) -> list[WebhookDelivery]:
    with platform.sessions() as session:
        return list(session.scalars(select(WebhookDelivery)))


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


def test_many_hanging_receivers_and_all_that_waits_for_them_hold_nobody_up(
    platform: Platform, receiver: Receiver
) -> None:
    """More of them than are sent to at once, each with so much that they would be served for minutes."""
    with contextlib.ExitStack() as stack:
        for _ in range(AT_ONCE + 1):
            hanging = stack.enter_context(webhook_receiver())
            hanging.reply = lambda _: None
            hook = register(platform, hanging.url)
            with platform.sessions.begin() as session:
                for _ in range(40):
                    queue_message(session, "webhook.test", {}, [hook.id])
        well = register(platform, receiver.url)
        platform.start("worker.reconcile")
        # By then every place has been taken by one that hangs.
        wait_until(lambda: sum(one.last_error is not None for one in all_deliveries(platform)) >= AT_ONCE, PATIENCE_S)
        began = time.monotonic()
        for _ in range(5):
            with platform.sessions.begin() as session:
                queue_message(session, "webhook.test", {}, [well.id])
        wait_until(lambda: len(receiver.known) == 5, PATIENCE_S)
        assert time.monotonic() - began < 15


def test_a_receiver_that_takes_them_is_sent_what_waits_without_a_pause(platform: Platform, receiver: Receiver) -> None:
    hook = register(platform, receiver.url)
    with platform.sessions.begin() as session:
        for _ in range(100):
            queue_message(session, "webhook.test", {}, [hook.id])
    platform.start("worker.reconcile")
    wait_until(lambda: len(receiver.requests) > 0, PATIENCE_S)
    began = time.monotonic()
    wait_until(lambda: len(receiver.known) == 100, PATIENCE_S)
    assert time.monotonic() - began < 100 * LOOK_EVERY_S / 2
    assert len(receiver.requests) == 100


def test_a_message_that_cannot_be_sent_for_a_fault_of_ours_uses_its_attempts_up(
    platform: Platform, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> Answer:
        raise RuntimeError("no such thing")

    monkeypatch.setattr("worker.webhooks.post", broken)
    hook = register(platform, receiver.url)
    with platform.sessions.begin() as session:
        queue_message(session, "webhook.test", {}, [hook.id])
    for name, value in platform.environment().items():
        monkeypatch.setenv(name, value)
    sender = WebhookSender(read_settings())
    sender.start()
    try:
        wait_until(lambda: deliveries(platform, hook)[0].status == "dead", PATIENCE_S)
    finally:
        sender.stop()
    (one,) = deliveries(platform, hook)
    assert (one.attempts, one.last_error) == (3, "it could not be sent: RuntimeError: no such thing")
