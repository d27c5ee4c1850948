"""Create requests that may be repeated: one key, one body, one result. Nothing here commits.

The key's row is written in the transaction that creates the resource. A simultaneous repeat waits on the primary key
until that transaction ends, and then finds the row (or, if it was rolled back, takes the key itself).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from store.models import IdempotencyKey


class KeyReused(Exception):
    """The key was used before with another body."""


@dataclass(frozen=True)
class Request:
    """What makes two requests the same: key, route, who asks, and the body's digest."""

    key: str
    route: str
    principal: str
    body_sha256: str


def body_sha256(body: Mapping[str, Any]) -> str:
    """Digest of a JSON body, whatever the order of its fields."""
    text = json.dumps(body, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def find_result(session: Session, request: Request) -> str | None:
    """The resource that this request made before; None when it is new.

    Raises:
        KeyReused: the key was used with another body.
    """
    row = session.scalar(
        select(IdempotencyKey).where(
            IdempotencyKey.key == request.key,
            IdempotencyKey.route == request.route,
            IdempotencyKey.principal == request.principal,
        )
    )
    if row is None:
        return None
    if row.body_sha256 != request.body_sha256:
        raise KeyReused(request.key)
    return row.resource_id


def take_key(session: Session, request: Request, resource_id: str) -> bool:
    """Bind the key to a resource about to be created. False when another request was faster: see `find_result`."""
    taken = session.scalar(
        insert(IdempotencyKey)
        .values(
            key=request.key,
            route=request.route,
            principal=request.principal,
            body_sha256=request.body_sha256,
            resource_id=resource_id,
        )
        .on_conflict_do_nothing()
        .returning(IdempotencyKey.key)
    )
    return taken is not None
