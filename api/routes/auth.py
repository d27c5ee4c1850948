"""Signing a browser in by a one-time link, and out; who is asking."""

from __future__ import annotations

from fastapi import APIRouter, Response

from api.auth import COOKIE, least
from api.deps import Database, Settings, Who
from api.errors import ProblemError
from api.schemas import Login, LoginBody, Me
from store import audit, keys

router = APIRouter(prefix="/v1", tags=["auth"])


@router.post("/auth/login", openapi_extra=least("open"))
def log_in(body: LoginBody, database: Database, settings: Settings, response: Response) -> Login:
    """Trade the token of a login link for a session cookie. A link works once."""
    new = keys.use_login_link(database, body.token)
    if new is None:
        message = "This link was used before or has expired; `ppo up` prints a new one when it starts."
        raise ProblemError(401, "bad_login_link", message)
    audit.record(database, "browser", "auth.login", new.role)
    database.commit()
    response.set_cookie(
        COOKIE,
        new.cookie,
        max_age=int(keys.SESSION_LASTS.total_seconds()),
        httponly=True,
        samesite="strict",
        secure=settings.cookie_secure,
        path="/",
    )
    return Login.model_validate(new)


@router.post("/auth/logout", status_code=204, openapi_extra=least("viewer"))
def log_out(database: Database, who: Who, response: Response) -> None:
    """End the session of this browser. A bearer key stays valid: revoke it instead."""
    if who.session_sha256 is not None:
        keys.end_session(database, who.session_sha256)
        audit.record(database, who.name, "auth.logout", who.role)
        database.commit()
    response.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")


@router.get("/me", openapi_extra=least("viewer"))
def read_me(who: Who) -> Me:
    """Who is asking, and what a browser's mutations must carry."""
    return Me.model_validate(who, from_attributes=True)
