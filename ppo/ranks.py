"""How `ppo train` starts the ranks of a run: away from the terminal's keys, and told to stop if it dies itself."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from ppo_core.rundir import RankGroup, SegmentDir, device_names, free_port, rank_environment

LAUNCHER = Path(__file__).with_name("launch.py")


def start_ranks(segment: SegmentDir, attempt: int, size: int, num_gpus: int) -> RankGroup:
    """Start every rank of an attempt, each with its own log.

    Args:
        segment: an existing segment folder.
        attempt: its number, which is the token of the commands that it obeys, too.
        size: how many ranks.
        num_gpus: the first of those that this process sees are the run's.
    """
    # The same setting as the worker's: tests put a scripted trainer in its place.
    trainer = shlex.split(os.environ.get("PPO_TRAINER_COMMAND", "")) or [sys.executable, "-m", "ppo_core.main"]
    command = [sys.executable, "-I", "-S", str(LAUNCHER), "SIGTERM", *trainer, str(segment.path)]
    command += ["--token", str(attempt), "--attempt", str(attempt)]
    devices = device_names(range(num_gpus), os.environ.get("CUDA_VISIBLE_DEVICES"))
    port = free_port()
    segment.logs.mkdir(parents=True, exist_ok=True)

    def start(rank: int, group: int) -> subprocess.Popen[bytes]:
        with segment.log(attempt, rank).open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **rank_environment(rank, size, port, devices)},
                process_group=group,  # The terminal's Ctrl-C goes to another one.
            )

    return RankGroup(size, start)
