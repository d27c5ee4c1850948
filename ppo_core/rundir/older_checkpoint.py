"""Where a run may go back to: its newest checkpoint from before an iteration, through its roll backs."""

from __future__ import annotations

from ppo_core.errors import RunDirectoryError
from ppo_core.rundir.checkpoint_files import checkpoint_iteration, checkpoints
from ppo_core.rundir.line import line_to
from ppo_core.rundir.segments import SegmentDir


def checkpoint_before(segment: SegmentDir, iteration: int) -> tuple[str, int] | None:
    """The newest checkpoint that was made before an iteration, in this segment or in those that it went on from.

    Returns:
        Its name, `segment:iteration`, and its iteration; None where there is none in this run directory.
    """
    try:
        for piece in line_to(segment):
            until = iteration - 1 if piece.last is None else min(iteration - 1, piece.last)
            made = [checkpoint_iteration(path) or 0 for path in checkpoints(piece.segment)]
            found = max((each for each in made if each <= until), default=None)
            if found is not None:
                return f"{piece.segment.number}:{found}", found
    except RunDirectoryError:  # A suggestion that cannot be made ends no run.
        return None
    return None
