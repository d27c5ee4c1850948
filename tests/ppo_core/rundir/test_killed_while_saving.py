"""Killed -9 at any moment of a save: there is a whole checkpoint to go back to, and never half a one is offered."""

from __future__ import annotations

import mmap
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ppo_core.rundir import (
    MANIFEST,
    JournalWriter,
    SegmentDir,
    all_events,
    checkpoint_iteration,
    checkpoints,
    journalled_digest,
    new_checkpoint,
    remove_leftovers,
    verify_checkpoint,
)
from tests.ppo_core.rundir.crash_saver import KEEP, STAGES

PROGRAM = Path(__file__).with_name("crash_saver.py")
SAVING = STAGES[1:]
KILLS_PER_STAGE = 10
# Calls that a stage has: chunks written; fsyncs, before and after; the manifest's; the name's; the journal's.
STEPS = {"write": 20, "fsync": 10, "manifest": 5, "rename": 3, "row": 1}


@dataclass
class Saver:
    """The saving program, and what it says of itself."""

    segment: SegmentDir
    process: subprocess.Popen[str]
    stage: mmap.mmap

    def start(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return int(self._line())

    def ended(self) -> int:
        return int(self._line())

    def is_in(self, stage: str, step: int) -> bool:
        return STAGES[self.stage[0]] == stage and self.stage[1] >= step

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[Saver]:
    segment = SegmentDir(tmp_path / "segment-0001")
    segment.checkpoints.mkdir(parents=True)
    file = tmp_path / "stage"
    file.write_bytes(bytes(2))
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), str(segment.path), str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process, file.open("r+b") as opened, mmap.mmap(opened.fileno(), 2) as stage:
        yield Saver(segment, process, stage)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(10) == 0


def kill_in(saver: Saver, stage: str, dice: random.Random) -> str:
    """Kill a new child at a random step of `stage` in one of its first saves; returns the stage that it fell in."""
    child = saver.start()
    saves, step = dice.randrange(2), dice.randrange(STEPS[stage])
    for _ in range(saves):
        wait(lambda: saver.is_in("row", 0))
        wait(lambda: not saver.is_in("row", 0))
    wait(lambda: saver.is_in(stage, step))
    os.kill(child, signal.SIGKILL)
    assert saver.ended() == -signal.SIGKILL
    return STAGES[saver.stage[0]]


def wait(until: object) -> None:
    deadline = time.monotonic() + 20
    assert callable(until)
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.0001)


def look(segment: SegmentDir, told_before: set[int]) -> set[int]:
    """What has to hold after every kill; returns the iterations that the journal tells of."""
    offered = checkpoints(segment)
    for path in offered:
        verify_checkpoint(path, journalled_digest(path))
    named = [path for path in segment.checkpoints.iterdir() if checkpoint_iteration(path) is not None]
    assert sorted(named) == offered, "a folder that bears a checkpoint's name is whole"
    JournalWriter(segment.journal).close()  # what a start does with a torn line
    told = {event.iteration for event in all_events(segment.journal)}
    assert told >= told_before, "what was told stays told"
    numbers = {checkpoint_iteration(path) or 0 for path in offered}
    assert len(numbers) >= min(KEEP, len(told)), "there are whole ones to go back to"
    oldest = min(numbers, default=0)
    assert numbers >= {iteration for iteration in told if iteration >= oldest}, "and the newest told of is among them"
    assert max(numbers, default=0) >= max(told, default=0)
    return told


def test_fifty_kills_cost_no_whole_checkpoint_and_leave_nothing_half(
    saver: Saver, capsys: pytest.CaptureFixture[str]
) -> None:
    """T24 and P16: ten kills for each stage; the table says in which one they fell."""
    dice = random.Random(5)
    fell = {stage: Counter[str]() for stage in SAVING}
    told: set[int] = set()
    untold = 0
    plan = [stage for stage in SAVING for _ in range(KILLS_PER_STAGE)]
    dice.shuffle(plan)
    for stage in plan:
        fell[stage][kill_in(saver, stage, dice)] += 1
        told = look(saver.segment, told)
        untold += any(checkpoint_iteration(path) not in told for path in checkpoints(saver.segment))
    table = [f"{'aimed at':>10} | " + " | ".join(f"{stage:>8}" for stage in STAGES)]
    table += [f"{stage:>10} | " + " | ".join(f"{fell[stage][hit]:8}" for hit in STAGES) for stage in SAVING]
    with capsys.disabled():
        print("\n" + "\n".join(table))
    total = sum(fell.values(), Counter[str]())
    assert sum(total[stage] for stage in SAVING) >= 40, table
    assert min(total[stage] for stage in SAVING) >= 5, table
    assert untold >= 5, "a checkpoint between its name and its row is taken over, not lost"

    # A start clears what is left, and the next save works.
    remove_leftovers(saver.segment)
    assert list(saver.segment.checkpoints.iterdir()) != []
    assert sorted(saver.segment.checkpoints.iterdir()) == checkpoints(saver.segment)
    newest = checkpoint_iteration(checkpoints(saver.segment)[-1])
    assert newest is not None
    with new_checkpoint(saver.segment.checkpoint(newest + 1)) as folder:
        (folder / "state.json").write_text("{}")
    verify_checkpoint(saver.segment.checkpoint(newest + 1))
    assert (saver.segment.checkpoint(newest + 1) / MANIFEST).is_file()
