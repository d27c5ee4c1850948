"""Requests that make something and may be repeated: one Idempotency-Key, one body, one result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

from fastapi import Header
from sqlalchemy.orm import Session

from api.errors import ProblemError
from store import idempotency
from store.ids import new_id

T = TypeVar("T")

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=255,
        pattern=r"^[\x21-\x7e]+$",
        description="Required unless dry_run: repeating a request with its key never makes a second run.",
    ),
]


class Made(NamedTuple):
    """The id of what a request made; `now` is False where it had made it before."""

    id: str | None
    now: bool


def request_of(key: str | None, route: str, principal: str, body: Mapping[str, Any]) -> idempotency.Request:
    """What makes two requests the same.

    Raises:
        ProblemError: 400, there is no key: a request that makes something has to say when it is a repetition.
    """
    if key is None:
        raise ProblemError(400, "idempotency_key_missing", "Send an Idempotency-Key header, any text that is new.")
    return idempotency.Request(key, route, principal, idempotency.body_sha256(body))


def make_once(
    database: Session,
    request: idempotency.Request,
    kind: str,
    prepare: Callable[[], T],
    make: Callable[[str, T], None],
) -> Made:
    """Make what is asked, unless this request made it before, and commit.

    Args:
        kind: the letter that the new id begins with.
        prepare: what may take a while, such as reading files; no transaction waits for it.
        make: given the new id and what was prepared, it writes in the transaction that binds the key.
    """
    before = idempotency.find_result(database, request)
    if before is not None:
        return Made(before, now=False)
    database.rollback()
    prepared = prepare()
    made = new_id(kind)
    if not idempotency.take_key(database, request, made):  # A repetition that came at the same moment was faster.
        return Made(idempotency.find_result(database, request), now=False)
    make(made, prepared)
    database.commit()
    return Made(made, now=True)
