"""Folders and paths of a run."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ppo_core.errors import RunDirectoryError
from ppo_core.rundir.files import fsync_folder, write_atomically

_SEGMENT = re.compile(r"^segment-(\d{4,})$")
_ASIDE = re.compile(r"^\.segment-\d{4,}\.\d+\.tmp$")


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
    def skipped(self) -> Path:
        """Batches of optimizer steps that were skipped since they were not finite."""
        return self.path / "skipped"

    @property
    def number(self) -> int:
        return int(self.path.name.removeprefix("segment-"))

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def reserve(self) -> Path:
        """Space for the trainer's last word, kept while it runs."""
        return self.path / ".reserve"

    @property
    def control(self) -> Path:
        return self.path / "control"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def log(self, attempt: int, rank: int) -> Path:
        return self.logs / f"attempt-{attempt:02d}-rank-{rank}.log"

    def fault(self, attempt: int, rank: int) -> Path:
        """What a rank that failed alone leaves: JSON with `code`, `message`, `hint`, `traceback` and `exit_code`."""
        return self.logs / f"attempt-{attempt:02d}-rank-{rank}.fault.json"

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

    It is made aside and renamed: a segment that can be seen is whole, also when its maker was killed half-way.

    Raises:
        RunDirectoryError: the folder exists and holds another spec, or none.
    """
    segment = segment_dir(run_dir, start.segment)
    if not segment.path.exists():
        try:
            _make_aside_and_rename(segment, start)
        except OSError:
            if not segment.path.exists():  # else another maker came first, and took away what it found aside
                raise
    if segment.read_start() != start:
        raise RunDirectoryError(f"{segment.spec} exists and says something else; an old segment is never rewritten")
    return segment


def _make_aside_and_rename(segment: SegmentDir, start: SegmentStart) -> None:
    run_dir, name = segment.path.parent, segment.path.name
    aside = SegmentDir(run_dir / f".{name}.{os.getpid()}.tmp")
    shutil.rmtree(aside.path, ignore_errors=True)
    try:
        for folder in (aside.samples, aside.logs, aside.control, aside.checkpoints):
            folder.mkdir(parents=True)
        write_atomically(aside.spec, json.dumps(asdict(start), indent=2, ensure_ascii=False, allow_nan=False) + "\n")
        aside.path.rename(segment.path)
    finally:
        shutil.rmtree(aside.path, ignore_errors=True)
    fsync_folder(run_dir)
    for leftover in run_dir.glob(f".{name}.*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)


def is_unused(run_dir: Path) -> bool:
    """Whether this folder can take a new run: it is empty, but for what a killed `create_segment` left aside."""
    return all(_ASIDE.match(child.name) for child in run_dir.iterdir())


def segments(run_dir: Path) -> list[SegmentDir]:
    """The segments of a run directory, oldest first."""
    found = [(int(match[1]), child) for child in run_dir.glob("segment-*") if (match := _SEGMENT.match(child.name))]
    return [SegmentDir(path) for _, path in sorted(found)]
