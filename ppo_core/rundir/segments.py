"""Folders and paths of a run."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ppo_core.errors import RunDirectoryError
from ppo_core.rundir.files import write_atomically

_SEGMENT = re.compile(r"^segment-(\d{4,})$")


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
