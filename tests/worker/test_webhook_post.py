"""One attempt: how a message is signed, where it may go, and what an answer means."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import pytest

from store.webhook_hosts import WebhookHosts, parse_target, problem_with
from store.webhook_queue import Claimed
from tests.worker.webhook_receiver import Receiver, webhook_receiver
from worker.webhook_post import Answer, post, signature

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
HERE = WebhookHosts.parse("127.0.0.1")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with webhook_receiver() as found:
        found.secret = SECRET
        yield found


def send(url: str, hosts: WebhookHosts = HERE, timeout_s: float = 5, secrets: tuple[str, ...] = (SECRET,)) -> Answer:
    message = Claimed("d-1", "h-1", "e-1", url, secrets, 1, b'{"type":"run.state"}')
    return asyncio.run(post(message, hosts, timeout_s, ssl.create_default_context()))


def test_the_signature_is_that_of_the_standard() -> None:
    """The example of Standard Webhooks' own libraries."""
    found = signature(SECRET, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert found == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_a_message_arrives_signed_under_its_events_id(receiver: Receiver) -> None:
    assert send(receiver.url) == Answer(204)
    (got,) = receiver.requests
    assert (got.path, got.id, got.signed, got.message) == ("/hook?from=ppo", "e-1", True, {"type": "run.state"})


def test_while_two_secrets_sign_a_receiver_may_know_either(receiver: Receiver) -> None:
    other = "whsec_" + "QUJD" * 8
    for known, signed in ((SECRET, True), (other, True), ("whsec_" + "REVG" * 8, False)):
        receiver.secret = known
        assert send(receiver.url, secrets=(other, SECRET)) == Answer(204)
        assert receiver.requests[-1].signed == signed


def test_a_listed_hosts_token_is_sent(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = WebhookHosts.parse("127.0.0.1=HOOK_TOKEN")
    assert "HOOK_TOKEN" in (send(receiver.url, hosts).error or "")
    monkeypatch.setenv("HOOK_TOKEN", "s3cret")
    assert send(receiver.url, hosts) == Answer(204)
    assert receiver.requests[-1].authorization == "Bearer s3cret"


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ((500, {}), Answer(500, "the receiver answered with status 500")),
        ((307, {"Location": "/other"}), Answer(307, "the receiver answered with status 307")),
        ((429, {"Retry-After": "7"}), Answer(429, "the receiver answered with status 429", again_s=7.0)),
        ((410, {}), Answer(410, "the receiver answered with status 410: it is gone for good", final=True)),
    ],
)
def test_an_answer_other_than_2xx_is_a_failure_and_no_redirect_is_followed(
    reply: tuple[int, dict[str, str]], answer: Answer, receiver: Receiver
) -> None:
    receiver.reply = lambda _: reply
    assert send(receiver.url) == answer
    assert len(receiver.requests) == 1


def test_a_receiver_that_never_answers_costs_its_time_and_no_more(receiver: Receiver) -> None:
    receiver.reply = lambda _: None
    assert send(receiver.url, timeout_s=0.3) == Answer(error="no answer within 0.3 s")


def test_a_listed_name_that_stands_for_a_private_address_is_not_connected_to(receiver: Receiver) -> None:
    url = f"http://localhost:{receiver.port}/"
    answer = send(url, WebhookHosts.parse("localhost"))
    assert "which PPO_WEBHOOK_HOSTS does not allow" in (answer.error or "")
    assert receiver.requests == []


def test_the_connection_goes_to_the_address_that_was_looked_at(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name whose second answer would be another address: there is no second question."""
    asked: list[str] = []
    real = socket.getaddrinfo

    def rebinding(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(str(host))
        if host == "hooks.test":
            return real("127.0.0.1" if asked.count(host) == 1 else "127.0.0.2", port, *args, **kwargs)
        return real(host, port, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    assert send(f"http://hooks.test:{receiver.port}/", WebhookHosts.parse("hooks.test,127.0.0.1")) == Answer(204)
    assert asked.count("hooks.test") == 1


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("http://10.0.0.1/", "PPO_WEBHOOK_HOSTS"),
        ("http://hooks.example:99999/", "port"),
        ("https://user:pass@hooks.example/", "user name"),
        ("ftp://hooks.example/", "https://"),
        ("https://hooks.example/#x", "fragment"),
        ("https://hooks.example/?a=<b>", "odd characters"),
        ("https://other.example/", "'other.example'"),
        ("http://0x7f.0.0.1/", "not allowed"),
    ],
)
def test_an_address_that_may_not_be_is_refused_with_the_reason(url: str, word: str) -> None:
    assert word in (problem_with(url, WebhookHosts.parse("hooks.example")) or "")


def test_a_query_is_kept() -> None:
    target = parse_target("https://hooks.example:8443/in?sig=a%20b&sv=1")
    assert (target.endpoint.port, target.path) == (8443, "/in?sig=a%20b&sv=1")
