"""A scoring service on a real port of this machine, which answers as a test tells it to."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Said:
    """An answer: status, body, headers; `seconds` between the body's bytes, `hangs` before anything is said."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    hangs: bool = False
    closes: bool = False


def scores(*values: Any) -> Said:
    return Said(json.dumps({"scores": list(values)}).encode())


@dataclass
class Service:
    """`requests` are the bodies that came, `headers` and `path` those of the last one."""

    port: int
    answer: Callable[[dict[str, Any]], Said]
    requests: list[dict[str, Any]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    path: str = ""
    ending: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/score"


@contextlib.contextmanager
def live_service(answer: Callable[[dict[str, Any]], Said]) -> Iterator[Service]:
    """Runs until the block ends; `answer` is given each request, in threads."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            service.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            service.headers, service.path = dict(self.headers.items()), self.path
            request = json.loads(service.bodies[-1])
            service.requests.append(request)
            said = service.answer(request)
            if said.hangs:
                service.ending.wait()
            if said.hangs or said.closes:
                return
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.send_response(said.status)
                for name, value in {"Content-Length": str(len(said.body)), **said.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                for start in range(0, len(said.body), 1 if said.seconds else 1 << 16):
                    self.wfile.write(said.body[start : start + (1 if said.seconds else 1 << 16)])
                    self.wfile.flush()
                    if said.seconds and service.ending.wait(said.seconds):
                        return

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    service = Service(server.server_address[1], answer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield service
    finally:
        service.ending.set()
        server.shutdown()
        thread.join()
        server.server_close()
