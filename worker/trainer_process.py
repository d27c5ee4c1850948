"""The trainer of one attempt, a process a rank: none can outlive its supervisor; ended politely, and then not."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ppo_core.rundir import RankExit, RankGroup
from worker.processes import die_with_parent, marked_processes, marks, signal_marked

# Addresses with passwords are the platform's, not the trainer's.
_NOT_FOR_TRAINERS = ("DATABASE_URL", "REDIS_URL", "PGPASSWORD")


@dataclass(frozen=True)
class RankStart:
    """What one rank has for itself: the file that it prints to, and what is added to its environment."""

    log: Path
    environment: Mapping[str, str]


class TrainerProcesses:
    """Every rank of an attempt, marked with run and token. Start it from the main thread."""

    def __init__(self, words: Sequence[str], run_id: str, token: int, ranks: Sequence[RankStart]) -> None:
        self._run_id = run_id
        self._token = token
        parent = os.getpid()
        env = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_TRAINERS}

        def start(rank: int, group: int) -> subprocess.Popen[bytes]:
            with ranks[rank].log.open("ab") as log:
                return subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**env, **ranks[rank].environment, **marks(run_id, token)},
                    process_group=group,
                    preexec_fn=lambda: die_with_parent(parent),  # no other thread runs yet
                )

        self._group = RankGroup(len(ranks), start)

    @property
    def pids(self) -> list[int]:
        """Process numbers, by rank."""
        return self._group.pids

    def exits(self) -> list[RankExit]:
        """How each rank stands, looked at now."""
        return self._group.exits()

    def all_left(self) -> bool:
        """Whether no rank runs any longer; what they started may."""
        return self._group.all_left()

    def end(self, grace_s: float) -> bool:
        """Bring every process of this attempt to its end; call until True: all are proved gone.

        SIGTERM to the group first, after `grace_s` SIGKILL to the group and to every marked process wherever it is.
        """
        begins = not self._group.is_ending
        over = self._group.end(grace_s)
        if begins and self.all_left():
            signal_marked(self._run_id, self._token, signal.SIGTERM)
        if over:
            signal_marked(self._run_id, self._token, signal.SIGKILL)
        return self.all_left() and not marked_processes(self._run_id, self._token)
