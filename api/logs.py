"""Finds, reads and searches log files by byte position; memory use does not depend on their size."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Literal

from ppo_core.rundir import segments

Source = Literal["trainer", "supervisor"]
SUPERVISOR_LOG = "supervisor.log"
_RANK_LOG = re.compile(r"attempt-(\d+)-rank-(\d+)\.log")
_LINE_END = re.compile(rb"[\r\n]")

PIECE_BYTES = 256 * 1024
# One request's share of a search: a tenth of a second's work or so.
SEARCHED_BYTES = 4 * 1024 * 1024
LONGEST_LINE = 1000


@dataclass(frozen=True)
class LogPiece:
    """Text from byte `offset` to before byte `next_offset` of a file of `size` bytes."""

    text: str
    offset: int
    next_offset: int
    size: int


@dataclass(frozen=True)
class FoundLog:
    """A log file and what it is of."""

    source: Source
    attempt: int | None
    rank: int | None
    segment: int | None
    size: int
    modified_at: datetime


@dataclass(frozen=True)
class Match:
    """A line with a match in it, and the byte positions of both."""

    offset: int
    line_offset: int
    line: str


@dataclass(frozen=True)
class Matches:
    """What a stretch of a log gave; `next_offset` is where the next stretch begins."""

    items: tuple[Match, ...]
    offset: int
    next_offset: int
    size: int


def find_log(run_dir: Path, source: Source, attempt: int, rank: int) -> Path | None:
    """The log of an attempt's rank in the newest segment that it wrote, or the supervisors'; None without one."""
    if source == "supervisor":
        path = run_dir / SUPERVISOR_LOG
        return path if path.is_file() else None
    logs = (segment.log(attempt, rank) for segment in reversed(segments(run_dir)))
    return next((path for path in logs if path.is_file()), None)


def list_logs(run_dir: Path) -> list[FoundLog]:
    """Every log of a run that can be read: newest attempt first, ranks in order, the supervisors' last."""
    found: dict[tuple[int, int], FoundLog] = {}
    for folder in segments(run_dir):  # a later segment's stands for the attempt, as in `find_log`
        for path in folder.logs.glob("attempt-*-rank-*.log"):
            if (match := _RANK_LOG.fullmatch(path.name)) and path.is_file():
                attempt, rank = int(match[1]), int(match[2])
                found[attempt, rank] = _found(path, "trainer", attempt, rank, folder.number)
    logs = [found[key] for key in sorted(found, key=lambda key: (-key[0], key[1]))]
    supervisors = run_dir / SUPERVISOR_LOG
    return [*logs, _found(supervisors, "supervisor", None, None, None)] if supervisors.is_file() else logs


def _found(path: Path, source: Source, attempt: int | None, rank: int | None, segment: int | None) -> FoundLog:
    status = path.stat()
    return FoundLog(source, attempt, rank, segment, status.st_size, datetime.fromtimestamp(status.st_mtime, UTC))


def read_log(path: Path | None, offset: int, limit: int) -> LogPiece:
    """At most `limit` bytes from `offset` (negative: from the end); half a character is left for the next piece."""
    if path is None:
        return LogPiece("", 0, 0, 0)
    with path.open("rb") as file:
        size = file.seek(0, 2)
        start = max(size + offset, 0) if offset < 0 else min(offset, size)
        file.seek(start)
        data = file.read(limit)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    text = decoder.decode(data)
    pending, _ = decoder.getstate()
    if pending and (start + len(data) >= size or not text):
        text, pending = text + decoder.decode(b"", final=True), b""
    return LogPiece(text, start, start + len(data) - len(pending), size)


def search_log(path: Path | None, wanted: str, offset: int, most: int) -> Matches:
    """Lines from byte `offset` on that hold `wanted`, upper or lower case: `most` of them, within `SEARCHED_BYTES`.

    A line ends at a line feed or a carriage return, so each state of a progress bar is one. One that is longer than
    what is held in memory at once is searched in parts that overlap by `wanted`.
    """
    if path is None:
        return Matches((), 0, 0, 0)
    pattern = re.compile(re.escape(wanted), re.IGNORECASE)
    overlap = 4 * len(wanted)  # bytes that it takes at most
    with path.open("rb") as file:
        size = file.seek(0, 2)
        start = position = min(offset, size)
        found: list[Match] = []
        while position < min(size, start + SEARCHED_BYTES):
            stretch, step = _stretch(file, position, size, overlap)
            for match, end in _matches(stretch, position, pattern):
                # The overlap of a long line is seen twice.
                if not found or match.offset > found[-1].offset:
                    found.append(match)
                if len(found) == most:
                    return Matches(tuple(found), start, position + min(end, step), size)
            position += step
    return Matches(tuple(found), start, min(position, size), size)


def _stretch(file: BinaryIO, position: int, size: int, overlap: int) -> tuple[bytes, int]:
    """Whole lines from `position` on as far as memory is lent, and how far the next stretch is from there."""
    file.seek(position)
    data = file.read(PIECE_BYTES)
    if position + len(data) >= size:
        return data, max(len(data), 1)
    end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
    return (data[:end], end) if end else (data, max(len(data) - overlap, 1))


def _matches(stretch: bytes, position: int, pattern: re.Pattern[str]) -> Iterator[tuple[Match, int]]:
    """The first match of each line, and where in the stretch the next line begins.

    Text that is no UTF-8 keeps its bytes' count, so that positions are true.
    """
    if not pattern.search(stretch.decode("utf-8", errors="surrogateescape")):
        return
    begin = 0
    while begin < len(stretch):
        end = _LINE_END.search(stretch, begin)
        stop = end.start() if end else len(stretch)
        line = stretch[begin:stop].decode("utf-8", errors="surrogateescape")
        if match := pattern.search(line):
            yield _match(line, match, position + begin), stop + 1
        begin = stop + 1


def _match(line: str, match: re.Match[str], line_offset: int) -> Match:
    first = max(0, match.start() - LONGEST_LINE // 2)
    shown = line[first : first + LONGEST_LINE]
    text = _bytes(shown).decode("utf-8", errors="replace")
    return Match(line_offset + len(_bytes(line[: match.start()])), line_offset + len(_bytes(line[:first])), text)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", errors="surrogateescape")


def log_chunks(path: Path, size: int) -> Iterator[bytes]:
    """The first `size` bytes of a log, which may grow meanwhile."""
    with path.open("rb") as file:
        while size > 0 and (data := file.read(min(size, PIECE_BYTES))):
            size -= len(data)
            yield data
