"""A webhook's receiver on a real port of this machine: it checks signatures by itself and drops ids that it knows."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Received:
    """A request as it came."""

    path: str
    id: str
    signed: bool
    message: dict[str, Any]
    authorization: str | None


Reply = tuple[int, dict[str, str]]


@dataclass
class Receiver:
    """`requests` is all that came, `known` what is left when ids that came before are dropped."""

    port: int
    secret: str = ""
    reply: Callable[[Received], Reply | None] = lambda _: (204, {})  #: None: it never answers
    requests: list[Received] = field(default_factory=list)
    known: dict[str, Received] = field(default_factory=dict)
    ending: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook?from=ppo"

    def is_signed(self, headers: dict[str, str], body: bytes) -> bool:
        """As the documentation tells receivers to check."""
        if not self.secret:
            return False
        key = base64.b64decode(self.secret.removeprefix("whsec_"))
        content = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        expected = base64.b64encode(hmac.new(key, content, hashlib.sha256).digest()).decode()
        return f"v1,{expected}" in headers["webhook-signature"].split()


@contextlib.contextmanager
def webhook_receiver() -> Iterator[Receiver]:
    """Runs until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            signed = receiver.is_signed(headers, body)
            got = Received(self.path, headers["webhook-id"], signed, json.loads(body), headers.get("authorization"))
            receiver.requests.append(got)
            receiver.known.setdefault(got.id, got)
            reply = receiver.reply(got)
            if reply is None:
                receiver.ending.wait()
                return
            with contextlib.suppress(OSError):
                self.send_response(reply[0])
                for name, value in {"Content-Length": "0", **reply[1]}.items():
                    self.send_header(name, value)
                self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver = Receiver(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield receiver
    finally:
        receiver.ending.set()
        server.shutdown()
        thread.join()
        server.server_close()
