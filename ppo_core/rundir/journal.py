"""The journal: one event a line, appended and fsynced, strict JSON."""

from __future__ import annotations

import enum
import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any, Literal, Protocol

from ppo_core.errors import RunDirectoryError
from ppo_core.rundir.files import fsync_folder

EventType = Literal[
    "started", "phase", "metrics", "samples", "checkpoint", "alert", "gate", "preflight", "ack", "note", "shares", "end"
]

# Far more than any event takes. Readers hold a line in memory, and look for its end again and again while it grows.
LONGEST_LINE = 8 * 2**20
# What four bytes hold, as readers of a journal keep it.
_MOST_ITERATIONS = 2**31 - 1


class ExitCode(enum.IntEnum):
    """What a trainer leaves with, and the `code` of its journal's `end` event."""

    DONE = 0
    PAUSED = 10
    STOPPED = 11
    BAD_SPEC = 64
    DATA_OR_REWARD = 65
    GATE_OR_GUARD = 69
    FAULT = 70
    DRAINED = 75


@dataclass(frozen=True)
class Event:
    """One journal line. Non-finite numbers of `payload` are null in the file and named in `nonfinite`."""

    seq: int
    type: str
    iteration: int
    time: str
    payload: dict[str, Any]


def encode_event(event: Event) -> str:
    """One strict JSON line: NaN and infinities become null, and `nonfinite` says where they were and which."""
    nonfinite: dict[str, str] = {}

    def clean(value: Any, path: str) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            nonfinite[path] = "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
            return None
        if isinstance(value, Mapping):
            return {str(key): clean(item, f"{path}.{key}" if path else str(key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [clean(item, f"{path}.{index}") for index, item in enumerate(value)]
        return value

    line = {**asdict(event), "payload": clean(event.payload, "")}
    if nonfinite:
        line["nonfinite"] = nonfinite
    return json.dumps(line, ensure_ascii=True, allow_nan=False, separators=(",", ":")) + "\n"


def decode_event(line: str | bytes) -> Event:
    """The event of a journal line, with the non-finite numbers of metrics put back.

    Raises:
        RunDirectoryError: not a journal line.
    """
    try:
        fields = json.loads(line)
        nonfinite = fields.pop("nonfinite", {})
        event = Event(**fields)
        if not (type(event.seq) is int and type(event.iteration) is int and isinstance(event.payload, dict)):
            raise ValueError("seq and iteration are whole numbers, payload is an object")
        if not 0 <= event.iteration <= _MOST_ITERATIONS:
            raise ValueError(f"iteration {event.iteration} is not between 0 and {_MOST_ITERATIONS}")
        if not isinstance(event.type, str) or not isinstance(event.time, str):
            raise ValueError("type and time are text")
        for name, value in nonfinite.items():
            if name in event.payload:  # Metrics are flat; deeper places stay null.
                event.payload[name] = float(value)
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise RunDirectoryError(f"not a journal line: {line[:200]!r}: {error}") from error
    return event


def read_journal(path: Path, offset: int = 0, max_bytes: int = 4 * 1024 * 1024) -> tuple[list[Event], int]:
    """Whole lines from byte `offset` on, and the offset after them. A torn last line is left for the next call.

    Raises:
        RunDirectoryError: a line is none of a journal's, or longer than any of one.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(max_bytes)
            while data and b"\n" not in data:  # One line longer than the limit still has to be read whole.
                if len(data) > LONGEST_LINE:
                    raise RunDirectoryError(f"{path} has a line of more than {LONGEST_LINE} bytes from {offset} on")
                more = file.read(max_bytes)
                if not more:
                    break
                data += more
    except FileNotFoundError:
        return [], offset
    end = data.rfind(b"\n") + 1
    return [decode_event(line) for line in data[:end].splitlines()], offset + end


def all_events(path: Path) -> Iterator[Event]:
    """Every whole event of a journal, from its beginning; none where there is no file."""
    offset = 0
    while True:
        events, offset = read_journal(path, offset)
        if not events:
            return
        yield from events


class Journal(Protocol):
    """Where a trainer says what happens."""

    last: Event | None

    def append(self, type: EventType, iteration: int, payload: Mapping[str, Any]) -> Event:
        """Say one event."""
        ...

    def close(self) -> None: ...


class SilentJournal:
    """For ranks that do not speak for the run: what they say is what rank 0 says, and is not written again."""

    def __init__(self) -> None:
        self.last: Event | None = None

    def append(self, type: EventType, iteration: int, payload: Mapping[str, Any]) -> Event:
        self.last = Event((self.last.seq if self.last else 0) + 1, type, iteration, "", dict(payload))
        return self.last

    def close(self) -> None:
        pass


class JournalWriter:
    """Appends events to a segment's journal. One writer a segment: a second one is refused.

    Opening cuts a torn last line and goes on with the next `seq`.

    Raises:
        RunDirectoryError: another writer has it, a whole line cannot be read, or a `seq` is missing or doubled.
    """

    def __init__(self, path: Path) -> None:
        # Unbuffered, so that a write that fails half-way leaves nothing behind to be written later.
        self._file: FileIO = path.open("a+b", buffering=0)
        try:
            self.last = _lock_and_mend(self._file, path)
            fsync_folder(path.parent)  # What is in a file survives a power cut only if its name does.
        except BaseException:
            self._file.close()
            raise

    @property
    def next_seq(self) -> int:
        return self.last.seq + 1 if self.last else 1

    def append(self, type: EventType, iteration: int, payload: Mapping[str, Any]) -> Event:
        """Write one event and fsync it: what a reader has seen is never taken back by a crash.

        When that fails (a full disk), what was written of the line is cut again and the journal goes on from before.
        """
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        event = Event(self.next_seq, type, iteration, now, dict(payload))
        line = memoryview(encode_event(event).encode("ascii"))
        whole = os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) :]
        except BaseException:
            self._file.truncate(whole)
            raise
        self.last = event
        os.fsync(self._file.fileno())
        return event

    def close(self) -> None:
        self._file.close()


def has_writer(path: Path) -> bool:
    """Whether a living process, this one included, has the journal open to write it."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _lock_and_mend(file: FileIO, path: Path) -> Event | None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise RunDirectoryError(f"another trainer is writing {path}") from error
    last: Event | None = None
    whole = 0
    with path.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                break
            event = decode_event(line)
            expected = last.seq + 1 if last else 1
            if event.seq != expected:
                raise RunDirectoryError(
                    f"{path} has seq {event.seq} where {expected} belongs: lines were lost or added"
                )
            last = event
            whole += len(line)
    file.truncate(whole)
    return last
