"""Child processes of the stack: started with a log of their own, watched, restarted, stopped in time.

It knows nothing of what the processes do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

LAUNCHER = Path(__file__).parents[1] / "launch.py"
LOG_TAIL_LINES = 8
MAX_LOG_BYTES = 20 * 1024 * 1024

# A child that ends sooner than this after its start has failed to start; so many such ends in a row end the stack.
SETTLED_S = 30.0
MAX_QUICK_ENDS = 6
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 15.0


class StackError(Exception):
    """The stack cannot start or go on; the message is one that a user can act on."""


@dataclass
class Child:
    """One process, with what it takes to start it again.

    `death_signal` is what it gets when this process dies; `stop_signal` asks it to end.
    """

    name: str
    command: Sequence[str]
    log: Path
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    stop_signal: signal.Signals = signal.SIGTERM
    death_signal: signal.Signals = signal.SIGTERM
    launcher_flags: Sequence[str] = ()
    pass_fds: Sequence[int] = ()
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0

    def start(self) -> None:
        """Start it in a session of its own, so that a terminal's Ctrl-C reaches only its parent."""
        if self.log.exists() and self.log.stat().st_size > MAX_LOG_BYTES:
            self.log.replace(self.log.with_suffix(".log.1"))
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    str(LAUNCHER),
                    self.death_signal.name,
                    *self.launcher_flags,
                    *self.command,
                ],
                env=dict(self.env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=self.pass_fds,
            )
        self.started_at = time.monotonic()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def how_it_ended(self) -> str:
        code = self.process.returncode if self.process else None
        if code is not None and code < 0:
            return f"ended by {signal.Signals(-code).name}"
        return f"exit code {code}"

    def log_tail(self) -> str:
        """The last lines it printed, indented."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
        except OSError:
            return ""
        return "\n".join(f"    {line}" for line in lines)

    def stop(self, grace_s: float, hurry: threading.Event | None = None) -> bool:
        """Ask it to end, and end its whole session after `grace_s`, or once `hurry`. True when it ended by itself."""
        if self.process is None or self.process.poll() is not None:
            return True
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(self.stop_signal)
        until = time.monotonic() + grace_s
        while time.monotonic() < until and not (hurry is not None and hurry.is_set()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.1)
                return True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return False


def wait_until(ready: Callable[[], bool], child: Child, deadline_s: float) -> None:
    """Return once `ready()`.

    Raises:
        StackError: the child ended, or the deadline passed; with the end of its log.
    """
    until = time.monotonic() + deadline_s
    while not ready():
        if not child.alive:
            raise StackError(
                f"{child.name} did not start ({child.how_it_ended}); end of {child.log}:\n{child.log_tail()}"
            )
        if time.monotonic() > until:
            raise StackError(
                f"{child.name} was not ready within {deadline_s:.0f} s; end of {child.log}:\n{child.log_tail()}"
            )
        time.sleep(0.05)


class Keeper:
    """Restarts children that end, until it is told to stop. A child that never settles is given up.

    `failed` is set, and `failure` says why, when a child was given up.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._children: list[Child] = []
        self._quick_ends: dict[str, int] = {}
        self._due: dict[str, float] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="keeper", daemon=True)
        self.failed = threading.Event()
        self.failure: str | None = None

    def start(self) -> None:
        self._thread.start()

    def keep(self, child: Child) -> None:
        with self._lock:
            self._children.append(child)

    def release(self) -> None:
        """Restart nothing any more; what runs is the caller's to stop, and then to call `join`."""
        with self._lock:
            self._stopping.set()

    def join(self) -> None:
        """End the thread. Only when the children are stopped: they would take its end for their parent's."""
        with self._lock:
            self._children.clear()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while True:
            time.sleep(0.1)
            with self._lock:
                if self._stopping.is_set():
                    if not self._children:
                        return
                    continue
                for child in self._children:
                    if not child.alive:
                        self._restart(child)

    def _restart(self, child: Child) -> None:
        now = time.monotonic()
        if self.failed.is_set():
            return
        if child.name not in self._due:
            quick = now - child.started_at < SETTLED_S
            ends = self._quick_ends[child.name] = self._quick_ends.get(child.name, 0) + 1 if quick else 1
            if ends >= MAX_QUICK_ENDS:
                self.failure = (
                    f"{child.name} ended {ends} times soon after its start ({child.how_it_ended}); "
                    f"end of {child.log}:\n{child.log_tail()}"
                )
                self.failed.set()
                return
            wait_s = min(FIRST_WAIT_S * 2 ** (ends - 1), LONGEST_WAIT_S)
            self._report(f"{child.name} ended ({child.how_it_ended}); starting it again in {wait_s:g} s")
            self._due[child.name] = now + wait_s
        elif now >= self._due[child.name]:
            del self._due[child.name]
            child.start()
