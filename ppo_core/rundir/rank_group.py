"""The running ranks of an attempt, for whoever started them: one process group, looked at and ended together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from ppo_core.rundir.rank_exits import RankExit

# From SIGTERM to SIGKILL when a rank is lost: nothing can be saved without it, the others may say what they saw of it.
LOST_GRACE_S = 3.0
# Between the journal's `end` and their exit ranks only have to leave.
LEAVING_GRACE_S = 10.0


class RankGroup:
    """One process a rank. It is started from the main thread, as parent-death signals go by thread.

    Args:
        size: how many ranks.
        start: called with a rank and the process group that it belongs into, 0 for one of its own; starts its process.
    """

    def __init__(self, size: int, start: Callable[[int, int], subprocess.Popen[bytes]]) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._terminated_at: float | None = None
        # Of the ranks that ran when the end began: whether they stood stopped.
        self._ended: dict[int, bool] = {}
        try:
            for rank in range(size):
                # The group's number is the first one's, which nobody else gets until it is waited for.
                self._processes.append(start(rank, self._processes[0].pid if self._processes else 0))
        except BaseException:
            self.kill()
            self.wait()
            raise

    @property
    def pids(self) -> list[int]:
        """Process numbers, by rank."""
        return [process.pid for process in self._processes]

    def exits(self) -> list[RankExit]:
        """How each rank stands, looked at now."""
        return [
            RankExit(rank, process.poll(), ended=rank in self._ended, stopped=self._ended.get(rank, False))
            for rank, process in enumerate(self._processes)
        ]

    def all_left(self) -> bool:
        """Whether no rank runs any longer; what they started may."""
        return all(process.poll() is not None for process in self._processes)

    @property
    def is_ending(self) -> bool:
        """Whether `end` was called."""
        return self._terminated_at is not None

    def end(self, grace_s: float) -> bool:
        """SIGTERM to the group at the first call, SIGKILL once `grace_s` is over: call it until all have left.

        Returns:
            Whether the grace is over.
        """
        now = time.monotonic()
        if self._terminated_at is None:
            self._terminated_at = now
            running = [exit.rank for exit in self.exits() if exit.status is None]
            self._ended = {rank: _stands_stopped(self.pids[rank]) for rank in running}
            self._signal(signal.SIGTERM)
        over = now - self._terminated_at >= grace_s
        if over:
            self.kill()
        return over

    def kill(self) -> bool:
        """SIGKILL to every process of the group; False where there is none. A handler of signals may call it."""
        return self._signal(signal.SIGKILL)

    def wait(self) -> None:
        """Until no rank runs any longer."""
        for process in self._processes:
            process.wait()

    def _signal(self, number: signal.Signals) -> bool:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._processes:
                os.killpg(self._processes[0].pid, number)
                return True
        return False


def _stands_stopped(pid: int) -> bool:
    """Whether a process stands still by SIGSTOP or a debugger, so that others wait for it in vain."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state in ("T", "t")
