"""The trainer of one attempt, a process a rank: none can outlive its supervisor; ended politely, and then not."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ppo_core.rundir import RankExit, stands_stopped
from worker.processes import die_with_parent, kill_marked, marked_processes, marks, signal_marked

# Addresses with passwords are the platform's, not the trainer's.
_NOT_FOR_TRAINERS = ("DATABASE_URL", "REDIS_URL", "PGPASSWORD")


@dataclass(frozen=True)
class RankStart:
    """What one rank has for itself: the file that it prints to, and what is added to its environment."""

    log: Path
    environment: Mapping[str, str]


class TrainerProcesses:
    """Every rank of an attempt, in one process group. Start it from the main thread: parent-death goes by thread."""

    def __init__(self, words: Sequence[str], run_id: str, token: int, ranks: Sequence[RankStart]) -> None:
        self._run_id = run_id
        self._token = token
        self._processes: list[subprocess.Popen[bytes]] = []
        self._terminated_at: float | None = None
        # Of the ranks that ran when the end began: whether they stood stopped.
        self._ended: dict[int, bool] = {}
        try:
            for rank in ranks:
                self._processes.append(self._start(words, rank))
        except BaseException:
            kill_marked(run_id, token)
            for process in self._processes:
                process.wait()
            raise

    def _start(self, words: Sequence[str], rank: RankStart) -> subprocess.Popen[bytes]:
        parent = os.getpid()
        env = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_TRAINERS}
        with rank.log.open("ab") as file:
            return subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**env, **rank.environment, **marks(self._run_id, self._token)},
                # That of the first, which keeps its number until it is waited for, also when it has died already.
                process_group=self._processes[0].pid if self._processes else 0,
                preexec_fn=lambda: die_with_parent(parent),  # no other thread runs yet
            )

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
        return all(process.poll() is not None for process in self._processes)

    def end(self, grace_s: float) -> bool:
        """Bring every process of this attempt to its end; call until True: all are proved gone.

        SIGTERM to the group first, after `grace_s` SIGKILL to the group and to every marked process wherever it is.
        """
        now = time.monotonic()
        if self._terminated_at is None:
            self._terminated_at = now
            self._ended = {
                exit.rank: stands_stopped(self.pids[exit.rank]) for exit in self.exits() if exit.status is None
            }
            self._signal_group(signal.SIGTERM)
            if self.all_left():
                signal_marked(self._run_id, self._token, signal.SIGTERM)
        if now - self._terminated_at >= grace_s:
            self._signal_group(signal.SIGKILL)
            signal_marked(self._run_id, self._token, signal.SIGKILL)
        return self.all_left() and not marked_processes(self._run_id, self._token)

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._processes[0].pid, number)
