"""The outermost layer: a request id and safe headers on every answer, and an answer for what nobody foresaw."""

from __future__ import annotations

import logging
import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import ProblemError, as_problem, problem_response

logger = logging.getLogger(__name__)

_OUTSIDE_ID = re.compile(r"^[A-Za-z0-9._-]{1,64}$")

# Inline scripts never run. Inline styles may: charts and progress bars set widths and colours.
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "font-src 'self'; connect-src 'self'; worker-src 'self'; manifest-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
DATA_POLICY = "default-src 'none'; frame-ancestors 'none'"


class Envelope:
    """Wraps the whole application; sets `scope["state"]["request_id"]`."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _OUTSIDE_ID.match(given) else secrets.token_hex(8)
        scope.setdefault("state", {})["request_id"] = request_id
        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                _set_headers(MutableHeaders(scope=message), scope["path"], request_id)
            await send(message)

        try:
            await self.app(scope, receive, send_with_headers)
        except Exception as error:
            if started:
                raise
            problem = as_problem(error)
            if problem is None:
                logger.exception("request %s failed: %s %r", request_id, scope["method"], scope["path"])
                problem = ProblemError(
                    500, "internal", f"Something went wrong here, not with the request. The log has it as {request_id}."
                )
            await problem_response(problem, request_id)(scope, receive, send_with_headers)


def _set_headers(headers: MutableHeaders, path: str, request_id: str) -> None:
    data = path.startswith("/v1/")
    headers["X-Request-Id"] = request_id
    headers["Content-Security-Policy"] = DATA_POLICY if data else PAGE_POLICY
    headers["X-Content-Type-Options"] = "nosniff"
    headers["Referrer-Policy"] = "no-referrer"
    headers["Cross-Origin-Opener-Policy"] = "same-origin"
    headers["Cross-Origin-Resource-Policy"] = "same-origin"
    headers.setdefault("Cache-Control", "no-store")
