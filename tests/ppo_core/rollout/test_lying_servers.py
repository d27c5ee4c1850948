"""Whatever a server by address says, or does not say, ends in a named error by its deadline, and never in silence."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ppo_core.errors import EngineLostError, EngineTimeoutError, RolloutError, WeightSyncError
from ppo_core.rollout import vllm_http
from ppo_core.rollout.vllm_http import ServerConnection
from ppo_core.rollout.vllm_replica import answers
from ppo_core.rollout.vllm_service import VLLMService
from tests.ppo_core.rollout.lying_server import LABEL, LyingServer, event, lying_server
from tests.ppo_core.tiny_models import tiny_tokenizer

TIMEOUT_S = 2.0
# Beyond which a wait counts as one for ever, on a machine that has other work.
LONG_S = 15.0
# As a machine may look `localhost` up, where the server listens at the last one.
PLACES = [(socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.2"), (socket.AF_INET, "127.0.0.1")]


@pytest.fixture
def lying() -> Iterator[LyingServer]:
    with lying_server() as server:
        yield server


@pytest.fixture
def service(lying: LyingServer) -> Iterator[VLLMService]:
    """Connected, and known to hold version 1."""
    made = VLLMService(
        "vLLM server 0",
        lying.url,
        {"PPO_ENGINE_HOSTS": "127.0.0.1"},
        timeout_s=TIMEOUT_S,
        max_rows=2,
        tokenizer=tiny_tokenizer(),
    )
    asyncio.run_coroutine_threadsafe(made._server.open(), made._loop).result()
    made._settings, made._weights_ok = {"engine": {"max_model_len": 64}}, "1"
    lying.said["/weight_info"] = {LABEL: made._label("1")}
    yield made
    made.kill()


def generate(service: VLLMService, num_rows: int = 1) -> list[dict[str, Any]]:
    """Rows of the service, or what keeps it from giving any."""
    began = time.monotonic()

    def check() -> None:
        assert time.monotonic() - began < LONG_S, "it waits for ever"

    rows = [{"row": row, "prompt": [1, 5], "seed": row} for row in range(num_rows)]
    sampling = {"temperature": 1.0, "max_new_tokens": 8, "stop_ids": [2], "stop_strings": []}
    (answer,) = answers([(service, service.ask("generate", rows=rows, sampling=sampling, version="1"))], check)
    found: list[dict[str, Any]] = answer["rows"]
    return found


def test_a_row_is_put_together_from_what_its_events_say(service: VLLMService, lying: LyingServer) -> None:
    lying.events = [event([7, 8], prompt_token_ids=[1, 5]), event([9, 2], "stop", prompt_token_ids=None)]
    (row,) = generate(service)
    assert row == {"row": 0, "prompt": [1, 5], "ids": [7, 8, 9, 2], "logprobs": [-1.0] * 4, "finish_reason": "stop"}


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([{}], "generate: what it answered cannot be read: KeyError: 'choices'"),
        ([event(["7"])], "TypeError: '7' is no token id"),
        ([event([7.5])], "TypeError: 7.5 is no token id"),
        ([event([7], logprobs={"token_logprobs": [None]})], "TypeError: float"),
        ([event([7], logprobs=None)], r"ValueError: zip\(\) argument 2 is shorter"),
        ([event([7], token_ids=None)], "TypeError: 'NoneType' object is not iterable"),
        ([b"data: [1]\n"], "TypeError: list indices"),
        ([b"data: {\n"], "the answer to /v1/completions is no JSON"),
        ([b"data: " + b"[" * 100_000 + b"\n"], "the answer to /v1/completions is no JSON"),
        ([{"error": {"message": "boom"}}], "boom"),
    ],
)
def test_an_answer_that_cannot_be_vllms_is_named(
    service: VLLMService, lying: LyingServer, events: list[Any], message: str
) -> None:
    lying.events = events
    with pytest.raises(RolloutError, match=message):
        generate(service)


def test_an_answer_without_end_is_not_kept(
    service: VLLMService, lying: LyingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_http, "MAX_ANSWER_BYTES", 1 << 20)
    lying.events = [b"data: {}" + b" " * (2 << 20), None]
    with pytest.raises(RolloutError, match="the answer is longer than 1048576 bytes"):
        generate(service)
    lying.said["/weight_info"] = b" " * (2 << 20)
    with pytest.raises(RolloutError, match="the answer is longer than 1048576 bytes"):
        generate(service)


def test_a_packed_answer_is_not_unpacked(service: VLLMService, lying: LyingServer) -> None:
    lying.headers = {"Content-Encoding": "gzip"}
    with pytest.raises(RolloutError, match="the answer is packed by gzip, which was not asked for"):
        generate(service)


@pytest.mark.parametrize("said", [{}, {LABEL: None}, [], b"<html>"])
def test_a_label_that_is_none_is_named(service: VLLMService, lying: LyingServer, said: Any) -> None:
    lying.said["/weight_info"] = said
    with pytest.raises(RolloutError):
        generate(service)


def test_a_server_that_lives_and_forgets_a_row_is_named_at_the_deadline(
    service: VLLMService, lying: LyingServer
) -> None:
    lying.events = [event([7]), None]
    began = time.monotonic()
    with pytest.raises(EngineTimeoutError, match="vLLM server 0 answers, but has made no token within 2 s"):
        generate(service)
    assert time.monotonic() - began >= TIMEOUT_S


def test_a_server_that_somebody_has_paused_is_not_waited_for(service: VLLMService, lying: LyingServer) -> None:
    lying.said["/is_paused"] = {"is_paused": True}
    with pytest.raises(WeightSyncError, match="somebody has paused it, so another trainer may be sending weights"):
        generate(service)


def test_a_server_that_is_taken_over_in_mid_generation_is_not_waited_for(
    service: VLLMService, lying: LyingServer
) -> None:
    lying.events = [event([7]), None]
    call = service.ask(
        "generate",
        rows=[{"row": 0, "prompt": [1, 5], "seed": 0}],
        sampling={"temperature": 1.0, "max_new_tokens": 8, "stop_ids": [2], "stop_strings": []},
        version="1",
    )
    assert service.answer(call, 0.5) is None
    lying.said["/weight_info"] = {LABEL: "another/1"}
    with pytest.raises(WeightSyncError, match="asked for policy version 1, but the engine holds 'another/1'"):
        answers([(service, call)])


def test_a_server_that_refuses_to_give_requests_up_counts_as_lost(service: VLLMService, lying: LyingServer) -> None:
    lying.events, lying.said["/abort_requests"] = [event([7]), None], 500
    sampling = {"temperature": 1.0, "max_new_tokens": 8, "stop_ids": [2], "stop_strings": []}
    call = service.ask("generate", rows=[{"row": 0, "prompt": [1, 5], "seed": 0}], sampling=sampling, version="1")
    assert service.answer(call, 0.2) is None
    with pytest.raises(EngineLostError, match="vLLM server 0 does not give up its requests: status 500"):
        service.abort(call, 5.0)


def test_one_that_was_let_go_of_is_not_asked_and_waited_for(service: VLLMService) -> None:
    service.kill()
    with pytest.raises(EngineLostError, match="vLLM server 0 was let go of before"):
        generate(service)


class Leaving(BaseHTTPRequestHandler):
    """Keeps a connection for two requests that follow each other at once, and hangs up on a later one."""

    protocol_version = "HTTP/1.1"
    before = 0.0

    def do_GET(self) -> None:
        if self.before and time.monotonic() - self.before > vllm_http.KEPT_S:
            self.close_connection = True
            return
        self.before = time.monotonic()
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_a_connection_that_the_server_may_be_about_to_end_is_not_used_again() -> None:
    async def twice(url: str) -> None:
        connection = ServerConnection("it", url, {"PPO_ENGINE_HOSTS": "127.0.0.1"}, LONG_S)
        await connection.open()
        await connection.get("/")
        await asyncio.sleep(vllm_http.KEPT_S + 0.1)
        await connection.get("/")
        await connection.close()

    with ThreadingHTTPServer(("127.0.0.1", 0), Leaving) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        asyncio.run(twice(f"http://127.0.0.1:{server.server_port}"))
        server.shutdown()
    assert vllm_http.KEPT_S <= 5 / 2  # vLLM ends them after 5 s.


def test_of_several_addresses_of_a_name_the_one_where_somebody_listens_is_taken(
    lying: LyingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = lying.server.server_port
    found = [(family, socket.SOCK_STREAM, 6, "", (host, port)) for family, host in PLACES]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **more: found)
    allowed = {"PPO_ENGINE_HOSTS": "localhost,127.0.0.0/8,[::1]"}

    async def health() -> None:
        connection = ServerConnection("it", f"http://localhost:{port}", allowed, LONG_S)
        await connection.open()
        assert await connection.get("/health") is None
        await connection.close()

    asyncio.run(health())
