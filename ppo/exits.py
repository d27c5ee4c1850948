"""What the `ppo` command leaves with, and how a run's end becomes such a code."""

from __future__ import annotations

import enum

from ppo_core.rundir import ExitCode

# Reasons of a stopped or paused run that mean: something that watches tripped.
TRIPPED = frozenset({"gate", "guard"})
# Reasons of a paused run that mean: it goes on when somebody has seen to the machine and resumes it.
HELD_UP = frozenset({"disk_full"})


class Exit(enum.IntEnum):
    """Exit codes of the command line; CI jobs rely on them."""

    SUCCEEDED = 0
    FAILED = 1
    USAGE = 2
    STOPPED = 3
    TRIPPED = 4
    TIMED_OUT = 5
    AUTH = 6
    UNREACHABLE = 7
    DETACHED = 130  # Ctrl-C while watching: the run goes on
    READER_GONE = 141  # `ppo ls | head -1`: as a shell reports SIGPIPE. 0 would say that a run had succeeded


CODES = (
    "0 succeeded · 1 failed · 2 usage, bad spec · 3 stopped or cancelled · 4 gate or guard tripped · "
    "5 wait timed out · 6 key refused · 7 no platform reached · 130 Ctrl-C, the run goes on · "
    "141 nobody reads the output any longer"
)


def of_run(state: str, reason_code: str | None) -> Exit | None:
    """The exit code of a run that has come to an end; None while it can still go on by itself."""
    if state == "succeeded":
        return Exit.SUCCEEDED
    if state == "failed":
        return Exit.FAILED
    if state in ("stopped", "paused") and reason_code in TRIPPED:
        return Exit.TRIPPED
    if state in ("stopped", "cancelled") or (state == "paused" and reason_code in HELD_UP):
        return Exit.STOPPED
    return None


def is_over(state: str, reason_code: str | None) -> bool:
    """Whether a run has come to an end, or was paused by what watches it or held up: it will not go on by itself."""
    return of_run(state, reason_code) is not None


def of_ended(state: str, reason_code: str | None) -> Exit:
    """The exit code of a run that is over."""
    code = of_run(state, reason_code)
    return Exit.FAILED if code is None else code


def of_trainer(code: int) -> Exit:
    """The exit code for a trainer's own, the `code` of its journal's `end`."""
    if code == ExitCode.DONE:
        return Exit.SUCCEEDED
    if code in (ExitCode.PAUSED, ExitCode.STOPPED, ExitCode.DRAINED):
        return Exit.STOPPED
    if code == ExitCode.GATE_OR_GUARD:
        return Exit.TRIPPED
    if code == ExitCode.BAD_SPEC:
        return Exit.USAGE
    return Exit.FAILED
