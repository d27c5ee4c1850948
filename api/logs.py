"""Reads pieces of log files; memory use does not depend on their size."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from pathlib import Path

from ppo_core.rundir import segments


@dataclass(frozen=True)
class LogPiece:
    """Text from byte `offset` to before byte `next_offset` of a file of `size` bytes."""

    text: str
    offset: int
    next_offset: int
    size: int


def find_log(run_dir: Path, attempt: int, rank: int) -> Path | None:
    """The log of an attempt, in the newest segment that it wrote; None when it wrote none."""
    logs = (segment.log(attempt, rank) for segment in reversed(segments(run_dir)))
    return next((path for path in logs if path.is_file()), None)


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
