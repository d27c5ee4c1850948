"""What travels about logs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from api.schemas import Message, Time


class LogText(Message):
    """A piece of a log by byte position. Bytes that are no UTF-8 appear as U+FFFD."""

    text: str
    offset: int
    next_offset: int
    size: int


class LogFile(Message):
    """A log that a run has: one of each rank of each attempt, and one of its supervisors."""

    source: Literal["trainer", "supervisor"]
    attempt: int | None = Field(description="Null for the supervisors' log, which all attempts share.")
    rank: int | None
    segment: int | None
    size: int
    modified_at: Time


class LogMatch(Message):
    """A line that holds what was searched; a line of more than a thousand characters is cut around it."""

    offset: int = Field(description="Byte position of the match.")
    line_offset: int = Field(description="Byte position of the first byte of `line`.")
    line: str


class LogMatches(Message):
    """Matches from `offset` to before `next_offset`, which is where to go on while it is below `size`."""

    items: list[LogMatch]
    offset: int
    next_offset: int
    size: int
