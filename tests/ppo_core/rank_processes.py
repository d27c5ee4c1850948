"""Starts the ranks of runs as whoever looks after them does, and gathers what became of each."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from ppo_core.rundir import SegmentDir
from ppo_core.rundir.ranks import free_port, rank_environment

Process = subprocess.Popen[bytes]
PROGRAM = Path(__file__).with_name("rank_program.py")


def start_ranks(num_ranks: int, *words: str, log: Path) -> list[Process]:
    """`num_ranks` processes of `python WORDS...`, each with its log beside `log`."""
    port = free_port()
    processes = []
    for rank in range(num_ranks):
        with log.with_name(f"{log.name}-{rank}.log").open("ab") as file:
            environment = {**os.environ, **rank_environment(rank, num_ranks, port, [])}
            processes.append(
                subprocess.Popen(
                    [sys.executable, *words], env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
                )
            )
    return processes


def exit_codes(processes: list[Process], seconds: float) -> list[int]:
    """By rank; what has not ended by then is killed, and is the test's failure."""
    until = time.monotonic() + seconds
    try:
        return [process.wait(max(0.1, until - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_all(segments: list[SegmentDir], num_ranks: int, log: Path, seconds: float = 900) -> None:
    """Run segments one after the other on the same ranks: to start processes takes longer than a toy run.

    Raises:
        AssertionError: a rank ended otherwise than well, with the end of its log.
    """
    words = (str(PROGRAM), *(str(segment.path) for segment in segments))
    codes = exit_codes(start_ranks(num_ranks, *words, log=log), seconds)
    tails = [log.with_name(f"{log.name}-{rank}.log").read_text()[-3000:] for rank in range(num_ranks)]
    assert codes == [0] * num_ranks, "\n".join(tails)
