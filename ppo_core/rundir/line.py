"""A run's present history in its run directory: through which segments it went, and how far each of them counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ppo_core.rundir.restart import start_iteration
from ppo_core.rundir.segments import SegmentDir, SegmentStart, segments


@dataclass(frozen=True)
class LinePiece:
    """What a segment has of a line: it goes on from iteration `start` and counts up to `last`; None: to its end."""

    segment: SegmentDir
    start: int
    last: int | None


def line_to(segment: SegmentDir) -> Iterator[LinePiece]:
    """A segment and those of its run that it went on from, newest first.

    Raises:
        RunDirectoryError: the start of a segment cannot be read.
    """
    last: int | None = None
    following: SegmentDir | None = segment
    while following is not None:
        start = following.read_start()
        began = start_iteration(start)
        yield LinePiece(following, began, last)
        # What its parent made after the checkpoint that it starts from was left behind.
        last = began if last is None else min(last, began)
        following = _parent(following, start)


def _parent(segment: SegmentDir, start: SegmentStart) -> SegmentDir | None:
    """The segment of the same run that this one starts from; a fork's first starts from another run's."""
    if start.checkpoint is None:
        return None
    run_dir, origin = segment.path.parent, Path(start.checkpoint).parent.parent
    parent = SegmentDir(run_dir / origin.name)  # By name: the folder of all runs may have been moved.
    earlier = [each for each in segments(run_dir) if each.number < segment.number]
    return parent if origin.parent.name == run_dir.name and parent in earlier else None
