"""A process that does nothing but save checkpoints, as the trainer does, and tells at every moment what it is doing.

python crash_saver.py SEGMENT STAGE_FILE: for each line on standard input a child is started that saves over and over.
Its number goes to standard output, and how it ended. The child is what the test kills; a new interpreter for each would
take longer than the test. No model, no torch: the files are small, the disk is a slow one (`SLOW_S` a call).

STAGE_FILE holds two bytes: the stage of `STAGES` that the child is in, and how many steps of it are over (of 256).
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ppo_core.rundir import (
    JournalWriter,
    SegmentDir,
    checkpoint_bytes,
    checkpoint_files,
    checkpoint_iteration,
    checkpoints,
    journalled_digest,
    manifest_digest,
    new_checkpoint,
    remove_checkpoint,
    remove_leftovers,
    verify_checkpoint,
)

# `row`: the checkpoint has its name, and nobody was told of it yet. `between` is none of a save.
STAGES = ("between", "write", "fsync", "manifest", "rename", "row")
SLOW_S = 0.001
FILES = {"policy/model.safetensors": 40_000, "state/rank-0000.safetensors": 120_000, "state.json": 2_000}
CHUNK = 8_000
KEEP = 3


class Stage:
    """What the child is doing, in memory that outlives it."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 2)

    def enter(self, name: str) -> None:
        self._memory[:2] = bytes([STAGES.index(name), 0])

    def step(self) -> None:
        """A call of the present stage begins; each takes a moment, as on a slow disk."""
        self._memory[1] = min(255, self._memory[1] + 1)
        time.sleep(SLOW_S)

    @property
    def name(self) -> str:
        return STAGES[self._memory[0]]


def tell_stages(stage: Stage) -> None:
    """The calls of `new_checkpoint` tell what they are: nothing else about them is changed."""

    def slow(call: Callable[..., Any]) -> Callable[..., Any]:
        def told(*args: Any) -> Any:
            stage.step()
            found = call(*args)
            stage.step()
            return found

        return told

    def entering(name: str, call: Callable[..., Any], of: tuple[str, ...]) -> Callable[..., Any]:
        def told(*args: Any) -> Any:
            if stage.name in of:
                stage.enter(name)
            return call(*args)

        return told

    os.fsync = slow(os.fsync)
    os.replace = slow(os.replace)
    os.rename = entering("rename", slow(os.rename), of=("manifest",))
    checkpoint_files.write_manifest = entering("fsync", checkpoint_files.write_manifest, of=("write",))
    checkpoint_files.write_atomically = entering("manifest", checkpoint_files.write_atomically, of=("fsync",))


def save_over_and_over(segment: SegmentDir, stage: Stage) -> None:
    """Start as a trainer starts, then save until killed."""
    journal = JournalWriter(segment.journal)
    remove_leftovers(segment)
    own = checkpoints(segment)
    for path in own[-1:]:
        verify_checkpoint(path, journalled_digest(path))
    iteration = (checkpoint_iteration(own[-1]) or 0) if own else 0
    while True:
        iteration += 1
        save(segment, iteration, journal, stage)
        for path in checkpoints(segment)[:-KEEP]:
            remove_checkpoint(path)


def save(segment: SegmentDir, iteration: int, journal: JournalWriter, stage: Stage) -> None:
    target = segment.checkpoint(iteration)
    stage.enter("write")
    with new_checkpoint(target) as folder:
        for name, size in FILES.items():
            (folder / name).parent.mkdir(exist_ok=True)
            with (folder / name).open("wb", buffering=0) as file:
                for start in range(0, size, CHUNK):
                    stage.step()
                    file.write(bytes([(iteration + start) % 256]) * min(CHUNK, size - start))
    stage.enter("row")
    payload = {
        "path": f"checkpoints/{target.name}",
        "bytes": checkpoint_bytes(target),
        "manifest_sha256": manifest_digest(target),
        "reason": "schedule",
        "judge_score": None,
    }
    journal.append("checkpoint", iteration, payload)
    stage.enter("between")


def main() -> None:
    segment, stage = SegmentDir(Path(sys.argv[1])), Stage(Path(sys.argv[2]))
    tell_stages(stage)
    for _ in sys.stdin:
        stage.enter("between")
        child = os.fork()
        if child == 0:
            try:
                save_over_and_over(segment, stage)
            finally:
                os._exit(1)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
