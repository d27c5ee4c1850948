"""HTTP scorers against a real service: every fault is its batch's own, and nothing outlasts the deadline."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from ppo_core.errors import DataError
from ppo_core.scoring import http_post
from ppo_core.scoring.combine import clean, load_judge
from ppo_core.scoring.http_post import MAX_ANSWER_BYTES, retry_after_s, wait_s
from ppo_core.scoring.http_service import HttpService
from ppo_core.scoring.source import Unusable
from ppo_core.spec.scorers import JudgeConfig
from tests.ppo_core.scoring.live_service import Said, Service, live_service, scores


def asking(
    service: Service, timeout_s: float = 10.0, batch_size: int = 64, retries: int = 0, hosts: str = "127.0.0.1"
) -> HttpService:
    return HttpService.of(service.url, batch_size, retries, timeout_s, {"PPO_REWARD_HOSTS": hosts})


def reasons(results: list[object]) -> list[object]:
    return [result.reason if isinstance(result, Unusable) else result for result in clean(results, len(results))]


def lengths(request: dict[str, Any]) -> Said:
    return scores(*[len(prompt) + len(text) for prompt, text in zip(*request.values(), strict=True)])


def test_prompts_and_responses_go_in_batches_and_scores_come_back_in_order() -> None:
    with live_service(lengths) as service:
        source = asking(service, batch_size=3)
        assert source.score(["p"] * 7, ["x" * n for n in range(7)]) == [1, 2, 3, 4, 5, 6, 7]
        source.close()
    assert sorted(len(request["responses"]) for request in service.requests) == [1, 3, 3]
    assert all(list(request) == ["prompts", "responses"] for request in service.requests)
    assert service.headers["Content-Type"] == "application/json"
    assert service.headers["Host"] == f"127.0.0.1:{service.port}"
    assert "Authorization" not in service.headers


def test_no_rows_are_no_request() -> None:
    with live_service(lengths) as service:
        source = asking(service)
        assert source.score([], []) == []
        source.close()
    assert service.requests == []


def test_any_text_goes_through_and_half_a_surrogate_pair_as_an_escape() -> None:
    texts = ["", "\n\x00", "half \ud800", "🎬", '"}']
    with live_service(lengths) as service:
        source = asking(service)
        assert source.score(["p"] * 5, texts) == [len(text) + 1 for text in texts]
        source.close()
    assert service.requests[0]["responses"] == texts
    assert b"half \\ud800" in service.bodies[0]


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (Said(b'{"scores": [NaN, 1.0]}'), ["nan", 1.0]),
        (Said(b'{"scores": [Infinity, 1]}'), ["infinite", 1.0]),
        (Said(b'{"scores": [1e999, 1]}'), ["infinite", 1.0]),
        (Said(b'{"scores": [null, 1]}'), ["missing", 1.0]),
        (Said(b'{"scores": ["0.5", true]}'), ["wrong_type", "wrong_type"]),
        (Said(b'{"scores": [[1], {}]}'), ["wrong_type", "wrong_type"]),
        (scores(1.0), ["wrong_count"] * 2),
        (scores(1.0, 2.0, 3.0), ["wrong_count"] * 2),
        (Said(b'{"scores": 1}'), ["bad_answer"] * 2),
        (Said(b"[1, 2]"), ["bad_answer"] * 2),
        (Said(b"<html>"), ["bad_answer"] * 2),
        (Said(b""), ["bad_answer"] * 2),
        (Said(b"[" * 100_000), ["bad_answer"] * 2),
        (Said(b"\xff\xff"), ["bad_answer"] * 2),
        (Said(b" " * (MAX_ANSWER_BYTES + 1)), ["bad_answer"] * 2),
        (Said(b"x", headers={"Content-Encoding": "gzip"}), ["bad_answer"] * 2),
        (Said(status=404), ["http_status"] * 2),
        (Said(status=500), ["http_status"] * 2),
        (Said(status=204), ["http_status"] * 2),
        (Said(closes=True), ["unreachable"] * 2),
    ],
    ids=range(20),
)
def test_an_answer_that_holds_no_scores_is_counted_by_its_reason(said: Said, found: list[object]) -> None:
    with live_service(lambda request: said) as service:
        source = asking(service)
        assert reasons(source.score(["p"] * 2, ["r"] * 2)) == found
        source.close()


def test_a_batch_that_fails_takes_no_other_with_it() -> None:
    def answer(request: dict[str, Any]) -> Said:
        return Said(hangs=True) if "hang" in request["responses"] else lengths(request)

    with live_service(answer) as service:
        source = asking(service, timeout_s=0.5, batch_size=2)
        found = reasons(source.score([""] * 6, ["a", "b", "hang", "c", "dd", "ee"]))
        source.close()
    assert found == [1.0, 1.0, "timeout", "timeout", 2.0, 2.0]


@pytest.mark.parametrize(
    "said",
    [
        Said(hangs=True),
        Said(b'{"scores": [1.0, 2.0]}', seconds=0.1),
        Said(status=503, headers={"Retry-After": "0"}),
        Said(status=503, headers={"Retry-After": "3600"}),
    ],
    ids=["hangs", "drips", "retries", "asks for an hour"],
)
def test_nothing_outlasts_the_deadline(said: Said) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with live_service(lambda request: said) as service:
        source = asking(service, timeout_s=0.7, retries=10)
        for _ in range(2):
            began = time.monotonic()
            results = source.score(["p"] * 2, ["r"] * 2)
            assert time.monotonic() - began < 1.5
            assert reasons(results) == (["http_status"] * 2 if said.status == 503 else ["timeout"] * 2)
        source.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_passing_fault_is_tried_again_and_a_lasting_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_post, "FIRST_WAIT_S", 0.01)
    for first, tries in ((Said(status=503), 3), (Said(status=429), 3), (Said(closes=True), 3), (Said(status=400), 1)):
        said = iter([first, first])
        with live_service(lambda request, said=said: next(said, scores(1.0))) as service:  # type: ignore[misc]
            source = asking(service, retries=2)
            results = source.score(["p"], ["r"])
            source.close()
        assert len(service.requests) == tries
        assert reasons(results) == ([1.0] if tries == 3 else ["http_status"])


def test_no_more_tries_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_post, "FIRST_WAIT_S", 0.01)
    with live_service(lambda request: Said(status=500)) as service:
        source = asking(service, retries=2)
        assert source.score(["p"], ["r"]) == [Unusable("http_status", "the service answered with status 500")]
        source.close()
    assert len(service.requests) == 3


def test_the_service_may_ask_for_a_longer_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_post, "FIRST_WAIT_S", 0.01)
    said = iter([Said(status=429, headers={"Retry-After": "1"})])
    with live_service(lambda request: next(said, scores(1.0))) as service:
        source = asking(service, retries=1)
        began = time.monotonic()
        assert source.score(["p"], ["r"]) == [1.0]
        assert 1.0 <= time.monotonic() - began < 3.0
        source.close()


def test_waits_double_up_to_the_longest() -> None:
    assert [wait_s(number) for number in range(9)] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("0", 0.0),
        (" 120 ", 120.0),
        ("Thu, 01 Jan 1970 00:02:00 GMT", 20.0),
        ("Thu, 01 Jan 1970 00:00:10 GMT", 0.0),
        ("-1", None),
        ("1.5", None),
        ("soon", None),
        ("9" * 400, None),
        (None, None),
    ],
)
def test_retry_after(header: str | None, seconds: float | None) -> None:
    assert retry_after_s(header, now=100.0) == seconds


# Who is spoken to


def test_a_redirect_is_not_followed() -> None:
    with live_service(lengths) as inner:
        headers = {"Location": inner.url}
        with live_service(lambda request: Said(status=307, headers=headers)) as service:
            source = asking(service, retries=2)
            assert reasons(source.score(["p"], ["r"])) == ["http_status"]
            source.close()
    assert inner.requests == []


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let names stand for addresses, one list a look-up; the last one stays."""

    def stand_for(*lists: list[str]) -> None:
        rest = list(lists)

        def look_up(host: str, port: int, *args: Any, **kwargs: Any) -> list[Any]:
            found = rest.pop(0) if len(rest) > 1 else rest[0]
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

        monkeypatch.setattr(socket, "getaddrinfo", look_up)

    return stand_for


@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254", "10.0.0.1"])
def test_a_listed_name_that_stands_for_a_special_address_is_not_spoken_to(
    names: Callable[..., None], address: str
) -> None:
    with live_service(lengths) as service:
        names(["93.184.215.14", address])
        url = f"http://rewards.example:{service.port}/"
        source = HttpService.of(url, 64, 3, 5.0, {"PPO_REWARD_HOSTS": "rewards.example"})
        (result,) = source.score(["p"], ["r"])
        source.close()
    assert isinstance(result, Unusable)
    assert result.reason == "forbidden_address"
    assert address in result.detail
    assert service.requests == []


def test_what_was_checked_is_what_is_spoken_to(names: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that stands for something else at the next look-up, as in DNS rebinding: it is looked up once a try."""
    with live_service(lengths) as service:
        names(["127.0.0.1"], ["10.9.9.9"])
        url = f"http://rewards.example:{service.port}/score"
        source = HttpService.of(url, 64, 0, 5.0, {"PPO_REWARD_HOSTS": "rewards.example,127.0.0.1"})
        assert source.score(["p"], ["r"]) == [2]
        assert service.headers["Host"] == f"rewards.example:{service.port}"
        assert reasons(source.score(["p"], ["r"])) == ["forbidden_address"]
        source.close()


def test_the_next_address_is_tried_where_one_takes_no_connection(names: Callable[..., None]) -> None:
    with live_service(lengths) as service:
        names(["127.0.0.9", "127.0.0.1"])
        hosts = {"PPO_REWARD_HOSTS": "rewards.example,127.0.0.0/8"}
        source = HttpService.of(f"http://rewards.example:{service.port}/", 64, 0, 5.0, hosts)
        assert source.score(["p"], ["r"]) == [2]
        source.close()


def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with live_service(lambda request: scores(99)) as proxy, live_service(lengths) as service:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("all_proxy", proxy.url)
        source = asking(service)
        assert source.score(["p"], ["r"]) == [2]
        source.close()


def test_nobody_at_home_is_unreachable() -> None:
    with live_service(lengths) as service:
        pass
    source = asking(service)
    assert reasons(source.score(["p"], ["r"])) == ["unreachable"]
    source.close()


def test_the_token_comes_from_the_environment_and_is_never_told() -> None:
    with live_service(lengths) as service:
        environment = {"PPO_REWARD_HOSTS": "127.0.0.1=MY_TOKEN", "MY_TOKEN": "s3cret"}
        source = HttpService.of(service.url, 64, 0, 5.0, environment)
        assert source.score(["p"], ["r"]) == [2]
        source.close()
        assert service.headers["Authorization"] == "Bearer s3cret"
        for token in ("", "s3cret\r\nX: y", "s3cret s3cret"):
            with pytest.raises(DataError, match=r"MY_TOKEN holds no token for '127\.0\.0\.1'") as caught:
                HttpService.of(service.url, 64, 0, 5.0, {**environment, "MY_TOKEN": token})
            assert "s3cret" not in str(caught.value)


def test_a_host_that_is_not_allowed_is_refused_before_anything_is_sent() -> None:
    with live_service(lengths) as service:
        with pytest.raises(DataError, match="is not allowed here"):
            asking(service, hosts="rewards.example")
        with pytest.raises(DataError, match="is no entry"):
            asking(service, hosts="http://x")
    assert service.requests == []


def test_a_judge_may_be_a_service_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPO_REWARD_HOSTS", "127.0.0.1")
    with live_service(lengths) as service:
        judge = load_judge(JudgeConfig(kind="http", url=service.url, batch_size=1))
        assert judge.score(["p", "p"], ["r", "rr"]).values.tolist() == [2.0, 3.0]
        judge.close()
    assert [len(json.loads(body)["prompts"]) for body in service.bodies] == [1, 1]
