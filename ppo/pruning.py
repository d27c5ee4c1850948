"""Deletes the checkpoints of a run directory that its retention rules let go. Only `ppo train` may: it owns the run.

Under the platform nobody here deletes anything, since only the database knows what is pinned.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ppo_core.errors import CheckpointError
from ppo_core.retention import Kept, RetentionRules, removable
from ppo_core.rundir import (
    SegmentDir,
    all_events,
    checkpoint_iteration,
    checkpoints,
    remove_checkpoint,
    segments,
    verify_checkpoint,
)


class Pruner:
    """Remembers which checkpoints it has compared with their manifests, so that each is read once."""

    def __init__(self, run_dir: Path, rules: RetentionRules) -> None:
        self._run_dir = run_dir
        self._rules = rules
        self._verified: dict[str, bool] = {}

    def prune(self) -> list[str]:
        """Verify from the newest back to a good one, then remove what may go. Returns what was damaged, in words."""
        damaged: list[str] = []
        folders: dict[str, Path] = {}
        kept: list[Kept] = []
        every = segments(self._run_dir)
        starts = {segment.read_start().checkpoint: number for number, segment in enumerate(every, start=1)}
        for number, segment in enumerate(every, start=1):
            scores = _judge_scores(segment)
            for folder in checkpoints(segment):
                iteration = checkpoint_iteration(folder) or 0
                starter = starts.get(str(folder))
                folders[str(folder)] = folder
                kept.append(
                    Kept(
                        str(folder),
                        number,
                        iteration,
                        verified=self._verified.get(str(folder)),
                        judge_score=scores.get(iteration),
                        protected_reason=f"segment {starter} starts from it" if starter else None,
                    )
                )
        for place in reversed(range(len(kept))):
            known = kept[place]
            if known.verified is None:
                try:
                    verify_checkpoint(folders[known.id])
                    self._verified[known.id] = True
                except CheckpointError as error:
                    self._verified[known.id] = False
                    damaged.append(str(error))
                kept[place] = replace(known, verified=self._verified[known.id])
            if kept[place].verified:
                break
        for removal in removable(kept, self._rules):
            remove_checkpoint(folders[removal.id])
        return damaged


def _judge_scores(segment: SegmentDir) -> dict[int, float | None]:
    return {
        event.iteration: event.payload.get("judge_score")
        for event in all_events(segment.journal)
        if event.type == "checkpoint"
    }
