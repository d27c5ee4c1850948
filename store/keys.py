"""Who may come in: bearer keys, one-time login links, browser sessions. Only SHA-256 digests of secrets are kept.

Secrets are 256 random bits, so one unsalted digest is as good as any slow hash. Nothing here commits.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy import func, or_, select, update
from sqlalchemy.orm import Session

from store.ids import new_id
from store.models import ApiKey, BrowserSession, LoginLink

KEY_PREFIX = "ppo_"
SESSION_LASTS = timedelta(days=14)
LINK_LASTS = timedelta(hours=24)
LAST_USE_KEPT_EVERY = timedelta(minutes=1)  # One write a minute and key, not one a request.


@dataclass(frozen=True)
class NewSession:
    """A browser session just begun: the cookie's value exists only here."""

    cookie: str
    csrf_token: str
    role: str
    expires_at: datetime


def digest(secret: str) -> str:
    """What is kept of a secret."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def create_key(session: Session, name: str, role: str, expires_at: datetime | None = None) -> tuple[ApiKey, str]:
    """A new bearer key: its row, and the key itself, which nobody can read again."""
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    row = ApiKey(id=new_id("a"), name=name, sha256=digest(key), role=role, expires_at=expires_at)
    session.add(row)
    session.flush()
    session.refresh(row)
    return row, key


def find_key(session: Session, key: str) -> ApiKey | None:
    """The key's row if it may be used now: known, not revoked, not expired."""
    return session.scalar(
        select(ApiKey).where(
            ApiKey.sha256 == digest(key),
            ApiKey.revoked_at.is_(None),
            or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > func.now()),
        )
    )


def last_use_is_old(key: ApiKey) -> bool:
    """Whether the key's last use is worth writing down anew."""
    return key.last_used_at is None or datetime.now(UTC) - key.last_used_at > LAST_USE_KEPT_EVERY


def note_use(session: Session, key_id: str) -> None:
    """Write down that a key was used now."""
    session.execute(update(ApiKey).where(ApiKey.id == key_id).values(last_used_at=func.now()))


def list_keys(session: Session) -> Sequence[ApiKey]:
    """All keys, newest first, revoked ones too."""
    return session.scalars(select(ApiKey).order_by(ApiKey.created_at.desc(), ApiKey.id)).all()


def revoke_key(session: Session, key_id: str) -> bool:
    """End a key's use. False when there is no such key; revoking twice changes nothing."""
    found = session.scalar(
        update(ApiKey)
        .where(ApiKey.id == key_id)
        .values(revoked_at=func.coalesce(ApiKey.revoked_at, func.now()))
        .returning(ApiKey.id)
    )
    return found is not None


def create_login_link(session: Session, role: str, lasts: timedelta = LINK_LASTS) -> str:
    """The token of a link that signs one browser in, once."""
    token = secrets.token_urlsafe(32)
    session.add(LoginLink(sha256=digest(token), role=role, expires_at=datetime.now(UTC) + lasts))
    session.flush()
    return token


def use_login_link(session: Session, token: str) -> NewSession | None:
    """Trade a link's token for a browser session; None when it is unknown, used or expired."""
    role = session.scalar(
        update(LoginLink)
        .where(LoginLink.sha256 == digest(token), LoginLink.used_at.is_(None), LoginLink.expires_at > func.now())
        .values(used_at=func.now())
        .returning(LoginLink.role)
    )
    if role is None:
        return None
    new = NewSession(secrets.token_urlsafe(32), secrets.token_urlsafe(32), role, datetime.now(UTC) + SESSION_LASTS)
    session.add(
        BrowserSession(sha256=digest(new.cookie), csrf_token=new.csrf_token, role=new.role, expires_at=new.expires_at)
    )
    session.flush()
    return new


def find_session(session: Session, cookie: str) -> BrowserSession | None:
    """The browser session of a cookie, if it has not ended."""
    return session.scalar(
        select(BrowserSession).where(BrowserSession.sha256 == digest(cookie), BrowserSession.expires_at > func.now())
    )


def end_session(session: Session, sha256: str) -> None:
    """Sign a browser out."""
    row = session.get(BrowserSession, sha256)
    if row is not None:
        session.delete(row)
        session.flush()
