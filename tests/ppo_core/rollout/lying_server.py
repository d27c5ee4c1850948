"""A server that speaks vLLM's routes as far as a rollout needs them, and says whatever a test has it say.

For faults that a real one does not have: those of test_vllm_service.py are of a real one.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LABEL = "weight_version"


def event(ids: list[Any], reason: str | None = None, **changes: Any) -> dict[str, Any]:
    """Of a stream: some tokens of a response to the prompt 1, 5."""
    choice = {
        "prompt_token_ids": [1, 5],
        "token_ids": ids,
        "logprobs": {"token_logprobs": [-1.0] * len(ids)},
        "finish_reason": reason,
    }
    return {"choices": [{**choice, **changes}]}


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: who was lied to may hang up in the middle."""


class LyingServer:
    """`url` is where it listens. Each route says what it is set to; the stream of rows what `events` says.

    Attributes:
        said: JSON, bytes or a status by route.
        headers: that each answer has besides.
        events: of every row; bytes go out as they are, and None stands for silence until the end.
        is_over: set at the end.
    """

    def __init__(self) -> None:
        self.said: dict[str, Any] = {
            "/weight_info": {LABEL: "?"},
            "/is_paused": {"is_paused": False},
            "/health": b"",
            "/abort_requests": {},
        }
        self.headers: dict[str, str] = {}
        self.events: list[dict[str, Any] | bytes | None] = [event([7, 2], "stop")]
        self.is_over = threading.Event()
        self.server = _Server(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        lying = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", "0")))
                if self.path == "/v1/completions":
                    self._stream()
                    return
                said = lying.said[self.path]
                if isinstance(said, int):
                    self._begin(said)
                    return
                self._begin(200)
                self.wfile.write(said if isinstance(said, bytes) else json.dumps(said).encode())

            do_POST = do_GET

            def _begin(self, status: int) -> None:
                self.send_response(status)
                for name, value in lying.headers.items():
                    self.send_header(name, value)
                self.end_headers()

            def _stream(self) -> None:
                self._begin(200)
                for one in lying.events:
                    if one is None:
                        lying.is_over.wait()
                        return
                    self.wfile.write(one if isinstance(one, bytes) else b"data: " + json.dumps(one).encode() + b"\n\n")
                    self.wfile.flush()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler


@contextmanager
def lying_server() -> Iterator[LyingServer]:
    """One that listens for the time this is entered."""
    lying = LyingServer()
    listening = threading.Thread(target=lying.server.serve_forever, args=(0.02,), daemon=True)
    listening.start()
    try:
        yield lying
    finally:
        lying.is_over.set()
        lying.server.shutdown()
        listening.join()
        lying.server.server_close()
