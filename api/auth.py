"""The door: every route is closed unless it says otherwise.

A route names the least role that may use it by `least("viewer")`; one that names none needs an admin, also one added
by hand, mounted, or unknown. Checked before the body is read, in this order: Host, Origin, credential, role, CSRF.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy.orm import Session, sessionmaker
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from api.errors import ProblemError
from store import keys

Access = Literal["open", "viewer", "operator", "admin"]
ROLES: tuple[Access, ...] = ("open", "viewer", "operator", "admin")
ROLE_MARK = "x-role"
COOKIE = "ppo_session"
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True)
class Caller:
    """Who is asking. `principal` tells callers apart; `name` is for people."""

    principal: str
    name: str
    role: Access
    csrf_token: str | None = None
    session_sha256: str | None = None


def least(role: Access) -> dict[str, Any]:
    """`openapi_extra` of a route: the least role that may use it; `open` needs no credential."""
    return {ROLE_MARK: role}


def access_of(route: BaseRoute) -> Access:
    """The least role of a route; admin where it says nothing."""
    extra = getattr(route, "openapi_extra", None) or {}
    role: Access = extra.get(ROLE_MARK) or getattr(route, "least_role", None) or "admin"
    return role


class Doorkeeper:
    """Lets a request pass, or answers 400, 401 or 403. Sets `scope["state"]["caller"]` where there is one."""

    def __init__(
        self,
        app: ASGIApp,
        sessions: sessionmaker[Session],
        allowed_hosts: Iterable[str],
    ) -> None:
        self.app = app
        self.sessions = sessions
        self.allowed_hosts = frozenset(allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._check(scope)
        elif scope["type"] != "lifespan":
            raise RuntimeError(f"no {scope['type']} here")
        await self.app(scope, receive, send)

    async def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        changes = scope["method"] not in SAFE_METHODS
        host = headers.get("host", "").lower()
        if _without_port(host) not in self.allowed_hosts:
            raise ProblemError(400, "bad_host", "This service does not answer to that host name.")
        if changes and not _same_origin(headers.get("origin"), host):
            raise ProblemError(403, "bad_origin", "Pages of another origin cannot change anything here.")
        access = self._access(scope)
        if access == "open":
            return
        caller = await self._caller(headers)
        if caller is None:
            raise ProblemError(401, "no_credential", "Sign in, or send a valid key as `Authorization: Bearer ...`.")
        if ROLES.index(caller.role) < ROLES.index(access):
            raise ProblemError(403, "role_too_low", f"This needs the role {access}; yours is {caller.role}.")
        if changes and caller.csrf_token is not None:
            given = headers.get("x-csrf-token", "")
            if not secrets.compare_digest(given.encode(), caller.csrf_token.encode()):
                raise ProblemError(403, "bad_csrf_token", "X-CSRF-Token is missing or not this session's.")
        scope["state"]["caller"] = caller

    def _access(self, scope: Scope) -> Access:
        partial: Access | None = None
        for route in scope["app"].routes:
            match, _ = route.matches(scope)
            if match is Match.FULL:
                return access_of(route)
            if match is Match.PARTIAL and partial is None:
                partial = "viewer"  # The address exists, the method does not: 405, but only for those let in.
        return partial or "viewer"

    async def _caller(self, headers: Headers) -> Caller | None:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme:  # A bad key is an error even where a good cookie came along.
            return await run_in_threadpool(self._by_key, key.strip()) if scheme.lower() == "bearer" else None
        cookie = cookie_parser(headers.get("cookie", "")).get(COOKIE)
        return await run_in_threadpool(self._by_cookie, cookie) if cookie else None

    def _by_key(self, key: str) -> Caller | None:
        with self.sessions.begin() as session:
            row = keys.find_key(session, key)
            if row is None:
                return None
            if keys.last_use_is_old(row):
                keys.note_use(session, row.id)
            return Caller(f"key:{row.id}", row.name, _role(row.role))

    def _by_cookie(self, cookie: str) -> Caller | None:
        with self.sessions.begin() as session:
            row = keys.find_session(session, cookie)
            if row is None:
                return None
            return Caller(f"session:{row.sha256}", "browser", _role(row.role), row.csrf_token, row.sha256)


def _role(name: str) -> Access:
    return next(role for role in ROLES[1:] if role == name)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]


def _same_origin(origin: str | None, host: str) -> bool:
    """A client that is no browser sends no Origin. SameSite cookies ignore ports, so the port is compared as well."""
    if origin is None:
        return True
    scheme, _, place = origin.lower().partition("://")
    return scheme in ("http", "https") and place == host
