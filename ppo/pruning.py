"""Deletes the checkpoints of a run directory that its retention rules let go. Only `ppo train` may: it owns the run.

Under the platform nobody here deletes anything, since only the database knows what is pinned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ppo_core.errors import CheckpointError
from ppo_core.retention import GATE_METRIC, History, Kept, RetentionRules, Stretch, removable
from ppo_core.rundir import (
    SegmentDir,
    all_events,
    checkpoint_iteration,
    checkpoints,
    remove_checkpoint,
    segments,
    verify_checkpoint,
)

NO_END = 10**9


class Pruner:
    """Remembers which checkpoints it has compared with their manifests, so that each is read once."""

    def __init__(self, run_dir: Path, rules: RetentionRules) -> None:
        self._run_dir = run_dir
        self._rules = rules
        self._verified: dict[str, bool] = {}

    def prune(self) -> list[str]:
        """Verify the newest, and the end of what each roll back left; remove what may go. Returns what was damaged."""
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
        places = range(len(kept))
        self._verify_newest(kept, places, folders, damaged)
        for left in range(1, len(every)):
            of_it = [place for place in places if kept[place].segment == left]
            if of_it and kept[of_it[-1]].protected_reason is None:  # else nothing was left behind
                self._verify_newest(kept, of_it, folders, damaged)
        for removal in removable(kept, self._rules, _history(every)):
            remove_checkpoint(folders[removal.id])
        return damaged

    def _verify_newest(
        self, kept: list[Kept], places: Sequence[int], folders: Mapping[str, Path], damaged: list[str]
    ) -> None:
        """Compare from the last of `places` back to one that is whole."""
        for place in reversed(places):
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


def _history(every: Sequence[SegmentDir]) -> History:
    """The line that survived, from its newest segment back, and the gates held on it."""
    line: list[Stretch] = []
    gates: list[int] = []
    number, last = len(every), NO_END
    while number:
        segment = every[number - 1]
        checkpoint = segment.read_start().checkpoint
        first = checkpoint_iteration(Path(checkpoint)) or 0 if checkpoint else 0
        line.append(Stretch(number, first, last))
        gates += [
            event.iteration
            for event in all_events(segment.journal)
            if event.type == "metrics" and GATE_METRIC in event.payload and first <= event.iteration <= last
        ]
        last = first
        parent = [n for n, other in enumerate(every, start=1) if checkpoint and _lies_in(other, checkpoint)]
        number = parent[0] if parent and parent[0] < number else 0
    # A segment begins behind the end of the one before it, by a roll back or since what lay beyond was lost or damaged.
    return History(tuple(line), tuple(gates), _open_onsets(every, line), tuple(range(1, len(every))))


def _open_onsets(every: Sequence[SegmentDir], line: Sequence[Stretch]) -> tuple[int, ...]:
    """Where the alerts began that were raised along the line, newest stretch first, and not cleared since."""
    onsets: dict[str, int] = {}
    for stretch in reversed(line):
        for event in all_events(every[stretch.segment - 1].journal):
            if event.type != "alert" or event.iteration > stretch.last:
                continue
            if event.payload["status"] == "cleared":
                onsets.pop(event.payload["id"], None)
            else:
                onsets[event.payload["id"]] = event.payload["onset"]
    return tuple(onsets.values())


def _lies_in(segment: SegmentDir, checkpoint: str) -> bool:
    return Path(checkpoint).parent == segment.checkpoints


def _judge_scores(segment: SegmentDir) -> dict[int, float | None]:
    return {
        event.iteration: event.payload.get("judge_score")
        for event in all_events(segment.journal)
        if event.type == "checkpoint"
    }
