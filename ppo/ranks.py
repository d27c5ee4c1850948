"""The trainer's processes under `ppo train`: started in a group of their own, and ended together."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from ppo_core.rundir import RankExit, SegmentDir, device_names, free_port, rank_environment, stands_stopped

LAUNCHER = Path(__file__).with_name("launch.py")
# From SIGTERM to SIGKILL when a rank is lost: nothing can be saved without it, only said.
LOST_GRACE_S = 3.0
# Between the trainer's last word and its exit it only has to leave.
LEAVING_GRACE_S = 10.0


class Ranks:
    """One attempt's processes: one a rank, each with its own log."""

    def __init__(self, segment: SegmentDir, attempt: int, size: int, num_gpus: int) -> None:
        # The same setting as the worker's: tests put a scripted trainer in its place.
        trainer = shlex.split(os.environ.get("PPO_TRAINER_COMMAND", "")) or [sys.executable, "-m", "ppo_core.main"]
        number = str(attempt)
        # If this process dies, they are told to stop.
        command = [sys.executable, "-I", "-S", str(LAUNCHER), "SIGTERM", *trainer, str(segment.path)]
        command += ["--token", number, "--attempt", number]
        devices = device_names(range(num_gpus), os.environ.get("CUDA_VISIBLE_DEVICES"))
        port = free_port()
        self._processes: list[subprocess.Popen[bytes]] = []
        # Of the ranks that ran when the end began: whether they stood stopped.
        self._ended: dict[int, bool] = {}
        self._kill_at: float | None = None
        segment.logs.mkdir(parents=True, exist_ok=True)
        try:
            for rank in range(size):
                with segment.log(attempt, rank).open("ab") as log:
                    process = subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env={**os.environ, **rank_environment(rank, size, port, devices)},
                        # Not the terminal's, whose Ctrl-C is for us; the first one's, which keeps its number meanwhile.
                        process_group=self._processes[0].pid if self._processes else 0,
                    )
                self._processes.append(process)
        except BaseException:
            if self._processes:
                self.kill()
                self.wait()
            raise

    def exits(self) -> list[RankExit]:
        """How each rank stands, looked at now."""
        return [
            RankExit(rank, process.poll(), ended=rank in self._ended, stopped=self._ended.get(rank, False))
            for rank, process in enumerate(self._processes)
        ]

    def end_after(self, grace_s: float, signum: signal.Signals | None = None) -> None:
        """Call again and again: sends `signum` once, and SIGKILL when the grace is over since the first call."""
        now = time.monotonic()
        if self._kill_at is None:
            self._kill_at = now + grace_s
            running = [rank for rank, process in enumerate(self._processes) if process.poll() is None]
            self._ended = {rank: stands_stopped(self._processes[rank].pid) for rank in running}
            if signum is not None:
                self._signal(signum)
        if now >= self._kill_at:
            self.kill()

    def kill(self) -> bool:
        """SIGKILL to every process of the group; False where there is none. A handler of signals may call it."""
        return self._signal(signal.SIGKILL)

    def wait(self) -> None:
        """Until all ranks are gone."""
        for process in self._processes:
            process.wait()

    def _signal(self, number: signal.Signals) -> bool:
        try:
            os.killpg(self._processes[0].pid, number)
        except ProcessLookupError:
            return False
        return True
