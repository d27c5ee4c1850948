"""Which segment a restart has to run."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ppo_core.errors import RunDirectoryError
from ppo_core.rundir.checkpoint_files import checkpoint_iteration, checkpoints
from ppo_core.rundir.journal import all_events
from ppo_core.rundir.segments import SegmentDir, SegmentStart, segments


def next_start(run_dir: Path, damaged: Collection[Path] = ()) -> SegmentStart:
    """What a restart of this run has to run: the newest segment again, or a new one behind it.

    The newest segment goes on when its journal ends where its newest checkpoint stands. When the journal is further
    than that, the iterations in between will be done again: a new segment starts from the checkpoint, so that no
    iteration ever has two values in one segment. Pass the result to `create_segment`.

    Args:
        damaged: checkpoints that are known not to be whole. They are passed over; the one that the newest segment
            itself starts from is not, since only who knows the run's history can name another.

    Raises:
        RunDirectoryError: the run has no segment yet.
    """
    existing = segments(run_dir)
    if not existing:
        raise RunDirectoryError(f"{run_dir} holds no segment to go on with")
    newest = existing[-1]
    start = newest.read_start()
    reached = last_iteration(newest)
    there = checkpoints(newest)
    whole = [path for path in there if path not in damaged]
    stands = checkpoint_iteration(whole[-1]) if whole else start_iteration(start)
    # A trainer takes the newest of its own segment: where that one is damaged it must be another segment.
    if reached <= (stands or 0) and there[-1:] == whole[-1:]:
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
