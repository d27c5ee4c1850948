"""One trainer process: started so that it cannot outlive its supervisor, ended politely and then not."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from worker.processes import die_with_parent, marked_processes, marks, signal_marked

# Addresses with passwords are the platform's, not the trainer's.
_NOT_FOR_TRAINERS = ("DATABASE_URL", "REDIS_URL", "PGPASSWORD")


class TrainerProcess:
    """Start it from the main thread: the parent-death signal goes by thread."""

    def __init__(
        self, words: Sequence[str], run_id: str, token: int, log: Path, environment: Mapping[str, str]
    ) -> None:
        self._run_id = run_id
        self._token = token
        parent = os.getpid()
        env = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_TRAINERS}
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**env, **environment, **marks(run_id, token)},
                process_group=0,
                preexec_fn=lambda: die_with_parent(parent),  # no other thread runs yet
            )
        self._terminated_at: float | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_status(self) -> int | None:
        """None while it runs; a signal as its negative number."""
        return self._process.poll()

    def end(self, grace_s: float) -> bool:
        """Bring every process of this attempt to its end; call until True: all are proved gone.

        SIGTERM to the group first, after `grace_s` SIGKILL to the group and to every marked process wherever it is.
        """
        now = time.monotonic()
        if self._terminated_at is None:
            self._terminated_at = now
            self._signal_group(signal.SIGTERM)
            if self.exit_status() is not None:
                signal_marked(self._run_id, self._token, signal.SIGTERM)
        if now - self._terminated_at >= grace_s:
            self._signal_group(signal.SIGKILL)
            signal_marked(self._run_id, self._token, signal.SIGKILL)
        return self.exit_status() is not None and not marked_processes(self._run_id, self._token)

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def describe_exit(status: int | None) -> str:
    """ "signal 9" or "exit code 1"."""
    if status is None:
        return "still running"
    return f"signal {-status}" if status < 0 else f"exit code {status}"
