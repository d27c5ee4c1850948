"""The run directory: the whole contract between a trainer and whoever looks after it. A door, importable without torch.

    RUN/segment-0001/spec.json            the resolved spec, and the checkpoint that the segment starts from
    RUN/segment-0001/journal.jsonl        append-only, one event a line
    RUN/segment-0001/samples/             texts and token records of kept responses, one file an iteration
    RUN/segment-0001/logs/                what each attempt's ranks printed
    RUN/segment-0001/control/             commands for one lease token
    RUN/segment-0001/checkpoints/         iter-000020/ and so on, each whole or absent

It knows neither database nor queue. Nothing here rewrites a file in place: files are written aside, fsynced and
renamed, and the journal only grows (but for a torn last line, which is cut when a trainer starts).
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from ppo_core.errors import CheckpointError, RunDirectoryError

EventType = Literal["started", "phase", "metrics", "samples", "checkpoint", "alert", "ack", "note", "end"]
CommandKind = Literal["stop", "pause", "checkpoint"]
SEVERITY: dict[str, int] = {"checkpoint": 0, "pause": 1, "stop": 2}

MANIFEST = "manifest.json"
_SEGMENT = re.compile(r"^segment-(\d{4,})$")
_CHECKPOINT = re.compile(r"^iter-(\d{6,})$")


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
class SegmentStart:
    """`spec.json`: what a segment runs, and where from.

    `spec` is the resolved run spec; `checkpoint` is the absolute path of the checkpoint to start from, None for the
    policy that the spec names; `run_id` is a label for logs.
    """

    run_id: str
    segment: int
    spec: dict[str, Any]
    checkpoint: str | None = None


@dataclass(frozen=True)
class Event:
    """One journal line. Non-finite numbers of `payload` are null in the file and named in `nonfinite`."""

    seq: int
    type: str
    iteration: int
    time: str
    payload: dict[str, Any]


@dataclass(frozen=True)
class ControlCommand:
    """A command for the trainer that holds `token`."""

    id: str
    kind: CommandKind
    token: int


@dataclass(frozen=True)
class SegmentDir:
    """The paths of one segment's folder."""

    path: Path

    @property
    def spec(self) -> Path:
        return self.path / "spec.json"

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def control(self) -> Path:
        return self.path / "control"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def log(self, attempt: int, rank: int) -> Path:
        return self.logs / f"attempt-{attempt:02d}-rank-{rank}.log"

    def checkpoint(self, iteration: int) -> Path:
        return self.checkpoints / f"iter-{iteration:06d}"

    def read_start(self) -> SegmentStart:
        try:
            return SegmentStart(**json.loads(self.spec.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise RunDirectoryError(f"{self.spec} cannot be read: {error}") from error


def segment_dir(run_dir: Path, segment: int) -> SegmentDir:
    """The folder of segment number `segment`, counted from 1."""
    return SegmentDir(run_dir / f"segment-{segment:04d}")


def create_segment(run_dir: Path, start: SegmentStart) -> SegmentDir:
    """Make a segment's folder with its `spec.json`; harmless when the same one is there already.

    Raises:
        RunDirectoryError: the folder exists and holds another spec.
    """
    segment = segment_dir(run_dir, start.segment)
    if segment.spec.exists():
        if segment.read_start() != start:
            raise RunDirectoryError(f"{segment.spec} exists and says something else; an old segment is never rewritten")
        return segment
    for folder in (segment.samples, segment.logs, segment.control, segment.checkpoints):
        folder.mkdir(parents=True, exist_ok=True)
    write_atomically(segment.spec, json.dumps(asdict(start), indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    return segment


def segments(run_dir: Path) -> list[SegmentDir]:
    """The segments of a run directory, oldest first."""
    found = [(int(match[1]), child) for child in run_dir.glob("segment-*") if (match := _SEGMENT.match(child.name))]
    return [SegmentDir(path) for _, path in sorted(found)]


# Files


def write_atomically(path: Path, text: str) -> None:
    """Write a small file aside, fsync it, and rename it into place."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Journal


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
        if (
            not isinstance(event.seq, int)
            or not isinstance(event.iteration, int)
            or not isinstance(event.payload, dict)
        ):
            raise ValueError("seq and iteration are whole numbers, payload is an object")
        for name, value in nonfinite.items():
            if name in event.payload:  # Metrics are flat; deeper places stay null.
                event.payload[name] = float(value)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RunDirectoryError(f"not a journal line: {line[:200]!r}: {error}") from error
    return event


def read_journal(path: Path, offset: int = 0, max_bytes: int = 4 * 1024 * 1024) -> tuple[list[Event], int]:
    """Whole lines from byte `offset` on, and the offset after them. A torn last line is left for the next call."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(max_bytes)
            while data and b"\n" not in data:  # One line longer than the limit still has to be read whole.
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


# Control


def send_command(segment: SegmentDir, command: ControlCommand) -> None:
    """Leave a command for the trainer that holds `command.token`."""
    segment.control.mkdir(parents=True, exist_ok=True)
    write_atomically(segment.control / f"{command.token:08d}-{command.id}.json", json.dumps(asdict(command)))


def read_commands(segment: SegmentDir, token: int) -> list[ControlCommand]:
    """Commands left for this token, oldest first; commands for other tokens are not for us."""
    found = []
    for path in segment.control.glob(f"{token:08d}-*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
            command = ControlCommand(**json.loads(path.read_text(encoding="utf-8")))
            if command.token == token and command.kind in SEVERITY:
                found.append((path.stat().st_mtime_ns, path.name, command))
    return [command for _, _, command in sorted(found, key=lambda each: each[:2])]


# Checkpoints


def checkpoint_iteration(folder: Path) -> int | None:
    """The iteration in a checkpoint folder's name; None for any other name."""
    match = _CHECKPOINT.match(folder.name)
    return int(match[1]) if match else None


def checkpoints(segment: SegmentDir) -> list[Path]:
    """The segment's whole checkpoints, lowest iteration first, compared as numbers."""
    found = [
        (iteration, child)
        for child in (segment.checkpoints.iterdir() if segment.checkpoints.is_dir() else ())
        if (iteration := checkpoint_iteration(child)) is not None and (child / MANIFEST).is_file()
    ]
    return [path for _, path in sorted(found)]


@contextlib.contextmanager
def new_checkpoint(target: Path) -> Iterator[Path]:
    """A folder to fill; on leaving it is hashed, fsynced and renamed to `target`, or removed if anything failed."""
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        write_manifest(aside)
        if target.exists():
            raise CheckpointError(f"{target} exists already; a checkpoint is never overwritten")
        aside.rename(target)
        fsync_folder(target.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def write_manifest(folder: Path) -> None:
    """Fsync every file of `folder` and write its size and SHA-256 to `manifest.json`."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                os.fsync(file.fileno())
            files[path.relative_to(folder).as_posix()] = {"sha256": digest, "bytes": path.stat().st_size}
    for path in [folder, *(child for child in folder.rglob("*") if child.is_dir())]:
        fsync_folder(path)
    write_atomically(folder / MANIFEST, json.dumps({"format": 1, "files": files}, indent=1) + "\n")


def read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """`{file: {"sha256": ..., "bytes": ...}}` of a checkpoint.

    Raises:
        CheckpointError: there is no manifest, or it cannot be read.
    """
    path = folder / MANIFEST
    try:
        files: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["files"]
        for name, entry in files.items():
            if not isinstance(entry["sha256"], str) or not isinstance(entry["bytes"], int):
                raise ValueError(f"the entry of {name!r} has no sha256 and bytes")
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise ValueError(f"{name!r} lies outside the checkpoint")
        if not files:
            raise ValueError("it lists no file")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read, so this is no whole checkpoint: {error}") from error
    return files


def verify_checkpoint(folder: Path) -> None:
    """Compare every file of a checkpoint with its manifest.

    Raises:
        CheckpointError: names the first file that is missing, of another size, or of other content.
    """
    for name, entry in read_manifest(folder).items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise CheckpointError(f"{path} has {size} bytes, its manifest says {entry['bytes']}")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != entry["sha256"]:
            raise CheckpointError(f"{path} has SHA-256 {digest}, its manifest says {entry['sha256']}")


def checkpoint_bytes(folder: Path) -> int:
    """Size of a whole checkpoint, by its manifest."""
    return sum(int(entry["bytes"]) for entry in read_manifest(folder).values())


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint: first its name, so that nobody ever sees half of one, then its files."""
    gone = folder.with_name(f".{folder.name}.removed")
    shutil.rmtree(gone, ignore_errors=True)
    folder.rename(gone)
    fsync_folder(folder.parent)
    shutil.rmtree(gone)


def remove_leftovers(segment: SegmentDir) -> None:
    """Remove what a killed writer left half-done among the checkpoints. Only the owner of the segment may call it."""
    for child in segment.checkpoints.glob(".iter-*"):
        shutil.rmtree(child, ignore_errors=True)


# Restart


def next_start(run_dir: Path) -> SegmentStart:
    """What a restart of this run has to run: the newest segment again, or a new one behind it.

    The newest segment goes on when its journal ends where its newest checkpoint stands. When the journal is further
    than that, the iterations in between will be done again: a new segment starts from the checkpoint, so that no
    iteration ever has two values in one segment. Pass the result to `create_segment`.

    Raises:
        RunDirectoryError: the run has no segment yet.
    """
    existing = segments(run_dir)
    if not existing:
        raise RunDirectoryError(f"{run_dir} holds no segment to go on with")
    newest = existing[-1]
    start = newest.read_start()
    reached = last_iteration(newest)
    whole = checkpoints(newest)
    stands = checkpoint_iteration(whole[-1]) if whole else start_iteration(start)
    if reached <= (stands or 0):
        return start
    return SegmentStart(
        run_id=start.run_id,
        segment=start.segment + 1,
        spec=start.spec,
        checkpoint=str(whole[-1]) if whole else start.checkpoint,
    )


def start_iteration(start: SegmentStart) -> int:
    """The iteration a segment starts from: 0, or that of its checkpoint."""
    return 0 if start.checkpoint is None else checkpoint_iteration(Path(start.checkpoint)) or 0


def last_iteration(segment: SegmentDir) -> int:
    """The highest iteration with metrics in a segment's journal; 0 when there is none."""
    return max((event.iteration for event in all_events(segment.journal) if event.type == "metrics"), default=0)
