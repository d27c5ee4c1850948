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
    LinePiece,
    SegmentDir,
    all_events,
    checkpoint_iteration,
    checkpoints,
    line_to,
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
        starts = {segment.read_start().checkpoint: segment.number for segment in every}
        for segment in every:
            scores = _judge_scores(segment)
            for folder in checkpoints(segment):
                iteration = checkpoint_iteration(folder) or 0
                starter = starts.get(str(folder))
                folders[str(folder)] = folder
                kept.append(
                    Kept(
                        str(folder),
                        segment.number,
                        iteration,
                        verified=self._verified.get(str(folder)),
                        judge_score=scores.get(iteration),
                        protected_reason=f"segment {starter} starts from it" if starter else None,
                    )
                )
        places = range(len(kept))
        self._verify_newest(kept, places, folders, damaged)
        for left in every[:-1]:
            of_it = [place for place in places if kept[place].segment == left.number]
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
    line = list(line_to(every[-1])) if every else []
    gates = [
        event.iteration
        for piece in line
        for event in all_events(piece.segment.journal)
        if event.type == "metrics" and GATE_METRIC in event.payload and _is_on(piece, event.iteration)
    ]
    stretches = [
        Stretch(piece.segment.number, piece.start, NO_END if piece.last is None else piece.last) for piece in line
    ]
    # A segment begins behind the end of the one before it, by a roll back or since what lay beyond was lost or damaged.
    left = tuple(segment.number for segment in every[:-1])
    return History(tuple(stretches), tuple(gates), _open_onsets(line), left)


def _is_on(piece: LinePiece, iteration: int) -> bool:
    return iteration >= piece.start and (piece.last is None or iteration <= piece.last)


def _open_onsets(line: Sequence[LinePiece]) -> tuple[int, ...]:
    """Where the alerts began that were raised along the line, newest piece first, and not cleared since."""
    onsets: dict[str, int] = {}
    for piece in reversed(line):
        for event in all_events(piece.segment.journal):
            if event.type != "alert" or not _is_on(piece, event.iteration):
                continue
            if event.payload["status"] == "cleared":
                onsets.pop(event.payload["id"], None)
            else:
                onsets[event.payload["id"]] = event.payload["onset"]
    return tuple(onsets.values())


def _judge_scores(segment: SegmentDir) -> dict[int, float | None]:
    return {
        event.iteration: event.payload.get("judge_score")
        for event in all_events(segment.journal)
        if event.type == "checkpoint"
    }
