"""Request bodies: JSON only, no longer than a limit, and here within a time. Read whole before any route sees them."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import ProblemError

WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS"})


class BodyLimit:
    """Answers 413, 408 or 415 itself; the application behind it gets one whole body."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in WITHOUT_BODY:
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self.max_bytes:
            raise self._too_long()
        try:
            async with asyncio.timeout(self.timeout_s):
                body = await self._read(receive)
        except TimeoutError as error:
            raise ProblemError(
                408, "body_too_slow", f"The body did not arrive within {self.timeout_s:g} s.", headers=_CLOSE
            ) from error
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if body and media_type != "application/json":
            raise ProblemError(415, "not_json", "Send the body as JSON with Content-Type: application/json.")
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_whole() -> Message:
            return pending.pop() if pending else await receive()

        await self.app(scope, receive_whole, send)

    async def _read(self, receive: Receive) -> bytes:
        chunks: list[bytes] = []
        num_bytes = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise ProblemError(400, "body_cut_off", "The body ended early.")
            chunk = message.get("body", b"")
            num_bytes += len(chunk)
            if num_bytes > self.max_bytes:
                raise self._too_long()
            chunks.append(chunk)
            if not message.get("more_body", False):
                return b"".join(chunks)

    def _too_long(self) -> ProblemError:
        return ProblemError(413, "body_too_long", f"The body is longer than {self.max_bytes} bytes.", headers=_CLOSE)


_CLOSE = {"Connection": "close"}  # What is still on its way is not read, so the connection cannot serve again.
