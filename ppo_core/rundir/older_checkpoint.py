"""Where a run may go back to: its newest checkpoint from before an iteration, through its roll backs."""

from __future__ import annotations

from pathlib import Path

from ppo_core.errors import RunDirectoryError
from ppo_core.rundir.checkpoint_files import checkpoint_iteration, checkpoints
from ppo_core.rundir.segments import SegmentDir, segments


def checkpoint_before(segment: SegmentDir, iteration: int) -> tuple[str, int] | None:
    """The newest checkpoint that was made before an iteration, in this segment or in those that it went on from.

    Returns:
        Its name, `segment:iteration`, and its iteration; None where there is none in this run directory.
    """
    run_dir, before = segment.path.parent, iteration - 1
    by_path = {each.path: number for number, each in enumerate(segments(run_dir), start=1)}
    while segment.path in by_path:
        found = [made for path in checkpoints(segment) if (made := checkpoint_iteration(path) or 0) <= before]
        if found:
            return f"{by_path[segment.path]}:{max(found)}", max(found)
        try:
            start = segment.read_start().checkpoint
        except RunDirectoryError:
            return None
        if start is None:
            return None
        # What its parent made after the checkpoint that this segment starts from belongs to what was left behind.
        before = min(before, checkpoint_iteration(Path(start)) or 0)
        parent = Path(start).parent.parent
        if parent.parent != run_dir or by_path.get(parent, 0) >= by_path[segment.path]:
            return None
        segment = SegmentDir(parent)
    return None
