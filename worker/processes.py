"""The processes of a run's attempts: found by a mark in their environment, ended, and proved gone.

Supervisor, trainer and whatever they start carry PPO_RUN_ID and PPO_LEASE_TOKEN. A process can leave its group and
its session, but not the environment it was started with, so the mark finds what a group's signal does not reach. One
that was given another environment is still known by where it prints to: the log of its attempt, whose number is its
lease's. Linux only, like everything that runs trainers.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

RUN_MARK = "PPO_RUN_ID"
TOKEN_MARK = "PPO_LEASE_TOKEN"
# Programs that name themselves in the list of processes, as vLLM's do, would write the name over their environment.
_KEEP_ENVIRONMENT = {"SPT_NOENV": "1"}
_ATTEMPT_LOG = re.compile(r"/segment-\d+/logs/attempt-(\d+)-rank-\d+\.log( \(deleted\))?")
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Marked:
    """A living process of an attempt."""

    pid: int
    token: int


def marks(run_id: str, token: int) -> dict[str, str]:
    """What an attempt's processes carry in their environment."""
    return {RUN_MARK: run_id, TOKEN_MARK: str(token), **_KEEP_ENVIRONMENT}


def marked_processes(run_id: str, up_to_token: int) -> list[Marked]:
    """Living processes of this run's attempts up to a lease token, without the caller. Zombies are dead."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        token = _token_of(entry, run_id)
        if token is not None and token <= up_to_token:
            found.append(Marked(int(entry.name), token))
    return found


def carries(pid: int, run_id: str, token: int) -> bool:
    """Whether this process belongs to the attempt; numbers of ended processes are given again to others."""
    return _token_of(Path(f"/proc/{pid}"), run_id) == token


def _token_of(entry: Path, run_id: str) -> int | None:
    try:
        words = (entry / "environ").read_bytes().split(b"\0")
        if f"{RUN_MARK}={run_id}".encode() not in words:
            return _prints_for(entry, run_id)
        prefix = f"{TOKEN_MARK}=".encode()
        return next((int(word[len(prefix) :]) for word in words if word.startswith(prefix)), None)
    except (OSError, ValueError):
        return None  # ended meanwhile, or somebody else's


def _prints_for(entry: Path, run_id: str) -> int | None:
    """The attempt of this run whose log a process writes what it prints to."""
    for descriptor in ("1", "2"):
        _, found, rest = str((entry / "fd" / descriptor).readlink()).partition(f"/{run_id}")
        if found and (match := _ATTEMPT_LOG.fullmatch(rest)):
            return int(match[1])
    return None


def signal_marked(run_id: str, up_to_token: int, number: signal.Signals) -> int:
    """Signal every living process of these attempts; returns how many there were."""
    found = marked_processes(run_id, up_to_token)
    for process in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)
    return len(found)


def kill_marked(run_id: str, up_to_token: int, patience_s: float = 5) -> list[Marked]:
    """Kill every process of these attempts; returns those that are still there, which is none almost always."""
    deadline = time.monotonic() + patience_s
    while signal_marked(run_id, up_to_token, signal.SIGKILL):
        if time.monotonic() > deadline:
            return marked_processes(run_id, up_to_token)
        time.sleep(0.02)
    return []


def die_with_parent(parent: int) -> None:
    """Called in a new process: let the kernel kill it when `parent` dies, which must be the one who started it."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        os.kill(os.getpid(), signal.SIGKILL)
