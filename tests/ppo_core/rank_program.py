"""A rank that runs several segments through the trainer's own entry; faults are put in by their folders' names.

python rank_program.py SEGMENT...
"""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import ppo_core.rollout.weights
import ppo_core.training.deepspeed
from ppo_core.main import run_segment
from ppo_core.rundir import SegmentDir

RANK = int(os.environ["RANK"])


def look(segment: SegmentDir, trainer: Any) -> None:
    """Write how many elements this rank holds of every parameter, and of how many; and whether it offloads."""
    held = {
        name: [getattr(weight, "ds_tensor", weight).numel(), getattr(weight, "ds_numel", weight.numel())]
        for name, weight in trainer.models.trainer.policy.named_parameters()
    }
    (segment.path / f"held-{RANK}.json").write_text(json.dumps(held))
    side = getattr(trainer.models.trainer, "_actor", None)
    offloads = bool(getattr(side and side.engine.optimizer, "cpu_offload", False))
    (segment.path / f"offloads-{RANK}.json").write_text(json.dumps(offloads))


def poison(trainer: Any) -> None:
    """The first backward pass of rank 1, which has tokens, has a gradient that is not finite."""
    engine, calls = trainer.models.trainer, itertools.count(1)
    backward = engine.backward
    if RANK == 1:
        engine.backward = lambda policy, value: backward(policy, value * math.nan if next(calls) == 1 else value)


def put_out(module: Any, name: str) -> None:
    """The next call of that function fails on this rank, and no later one."""
    plain = getattr(module, name)

    def fails(*arguments: Any) -> Any:
        setattr(module, name, plain)
        raise RuntimeError(f"{name} failed on rank {RANK}, said by a test")

    setattr(module, name, fails)


def change(segment: SegmentDir, trainer: Any) -> None:
    look(segment, trainer)
    if "poisoned" in segment.path.parent.name:
        poison(trainer)
    if segment.path.parent.name == "no-room" and RANK == 1:
        put_out(ppo_core.training.deepspeed, "_require_room")
    if segment.path.parent.name == "no-whole" and RANK == 0:
        put_out(ppo_core.rollout.weights, "merged_weight")


def main() -> None:
    for path in sys.argv[1:]:
        segment = SegmentDir(Path(path))
        code = run_segment(segment, 0, 1, change=lambda trainer, segment=segment: change(segment, trainer))
        # A fault that all ranks have agreed on leaves them fit for the next segment.
        if code != 0 and segment.path.parent.name not in ("no-room", "no-whole"):
            sys.stderr.flush()
            os._exit(int(code))
    os._exit(0)


if __name__ == "__main__":
    main()
