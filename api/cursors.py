"""Cursors of lists: opaque text that says which item was the last one seen."""

from __future__ import annotations

import base64
import json
from datetime import datetime

from api.errors import ProblemError
from api.schemas import FaultMessage

MAX_INTEGER = 2**63 - 1


def encode(*parts: str | int) -> str:
    """A cursor from the sort key of the last item."""
    return base64.urlsafe_b64encode(json.dumps(parts).encode()).decode().rstrip("=")


def decode_time_and_id(cursor: str) -> tuple[datetime, str]:
    """The (time, id) of a cursor made by `encode(time.isoformat(), id)`."""
    time, name = _parts(cursor)
    if not isinstance(time, str) or not isinstance(name, str):
        raise _bad_cursor()
    try:
        moment = datetime.fromisoformat(time)
    except ValueError as error:
        raise _bad_cursor() from error
    if moment.tzinfo is None:
        raise _bad_cursor()
    return moment, name


def decode_numbers(cursor: str) -> tuple[int, int]:
    """The two whole numbers of a cursor made by `encode(number, number)`."""
    first, second = _parts(cursor)
    if not isinstance(first, int) or not isinstance(second, int) or not 0 <= max(first, second) <= MAX_INTEGER:
        raise _bad_cursor()
    return first, second


def _parts(cursor: str) -> tuple[object, object]:
    try:
        first, second = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (ValueError, TypeError, RecursionError) as error:
        raise _bad_cursor() from error
    return first, second


def _bad_cursor() -> ProblemError:
    fault = FaultMessage(pointer="/query/cursor", message="not a cursor of this list; begin without one")
    return ProblemError(422, "bad_cursor", "The cursor is not valid.", errors=[fault])
