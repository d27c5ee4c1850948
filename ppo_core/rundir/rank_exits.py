"""How the ranks of an attempt ended, for whoever started them: in words, and the fault that one of them left alone.

Rank 0 writes the journal. Another one that fails leaves its fault beside its log. While the others are well they cannot
go on without it and leave, rank 0 without a word.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppo_core.rundir.journal import ExitCode
from ppo_core.rundir.segments import SegmentDir

# The code of a fault that the trainer has no name for.
UNNAMED = "unexpected"
# Ends that a new attempt would only repeat.
_FAULTS = {ExitCode.BAD_SPEC: "spec", ExitCode.DATA_OR_REWARD: "data", ExitCode.FAULT: "trainer_fault"}
_AT_REST = frozenset(
    {ExitCode.DONE, ExitCode.PAUSED, ExitCode.STOPPED, ExitCode.GATE_OR_GUARD, ExitCode.DRAINED},
)
_TAIL_BYTES = 8192
_TAIL_LINES = 15


@dataclass(frozen=True)
class RankExit:
    """How one rank left: `status` is its exit code, a signal as its negative number, None while it runs.

    `ended` is True where it still ran when whoever started it ended the attempt, `stopped` where it stood stopped then.
    """

    rank: int
    status: int | None
    ended: bool = False
    stopped: bool = False

    @property
    def left(self) -> bool:
        """Whether it has gone, and by itself or by somebody unknown."""
        return self.status is not None and not self.ended

    @property
    def killed(self) -> bool:
        """Whether somebody unknown sent it signal 9: most often the kernel, out of memory."""
        return self.left and self.status == -signal.SIGKILL

    @property
    def breaks_group(self) -> bool:
        """Whether the others cannot go on: it has left, and not because the run came to rest.

        Rank 0 says in the journal that the run is at rest, before it leaves; where it has not, any exit of it counts.
        """
        return self.left and (self.rank == 0 or self.status not in _AT_REST)


@dataclass(frozen=True)
class RankFault:
    """What one rank failed of by itself; `log` is where it printed."""

    rank: int
    code: str
    message: str
    hint: str | None
    log: Path

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.message}"


def describe_exits(exits: Sequence[RankExit]) -> str:
    """ "signal 9" of a single rank; of several "rank 1: signal 9; ranks 0, 2: exit code 1", the likely cause first."""
    if len(exits) == 1:
        return _how(exits[0].status)
    ranks: dict[str, list[int]] = {}
    for exit in sorted(exits, key=_likely_cause):
        how = _how(exit.status)
        if exit.ended:
            how += ", ended while it stood stopped" if exit.stopped else ", ended with the others"
        ranks.setdefault(how, []).append(exit.rank)
    return "; ".join(
        f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}: {how}" for how, numbers in ranks.items()
    )


def first_lost(exits: Sequence[RankExit]) -> int:
    """The rank whose log says most about an attempt that ended without a word."""
    return min(exits, key=_likely_cause).rank


def find_fault(segment: SegmentDir, attempt: int, exits: Sequence[RankExit]) -> RankFault | None:
    """The fault that ended an attempt of several ranks whose rank 0 did not say why; None where nothing tells of one.

    It is in the oldest file `SegmentDir.fault` of these ranks. Without such a file it is the exit code of a rank other
    than 0, with the end of its log as the message, unless another was killed: that one is the cause then.
    """
    told = [fault for exit in exits if (fault := _read_fault(segment, attempt, exit.rank)) is not None]
    if told:
        return min(told, key=lambda fault: segment.fault(attempt, fault.rank).stat().st_mtime_ns)
    if any(exit.killed for exit in exits):
        return None
    for exit in exits:
        if exit.rank and exit.left and exit.status in _FAULTS:
            code = ExitCode(exit.status)
            log = segment.log(attempt, exit.rank)
            message = f"{_how(code)}; the end of its log:\n{end_of_log(log)}"
            return RankFault(exit.rank, _FAULTS[code], message, f"Look at rank {exit.rank}'s log.", log)
    return None


def end_error(end: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `error` of a journal's `end`, whatever a trainer wrote there; empty where it tells of none."""
    error = end.get("error") or {}
    return error if isinstance(error, Mapping) else {"message": str(error)}


def echoes_a_rank(end: Mapping[str, Any], exits: Sequence[RankExit], fault: RankFault | None) -> bool:
    """Whether the fault of a journal's `end` is only what another rank's end looked like to rank 0.

    It then has no name, since it came out of a library whose exchange broke; and another rank was killed, or left a
    fault that says something else. A fault that all ranks share is in the journal and in each rank's file alike.

    Args:
        end: the payload of the `end` event.
        exits, fault: how the ranks left, and what `find_fault` says of them.
    """
    error = end_error(end)
    if end.get("code") != ExitCode.FAULT or error.get("code") != UNNAMED:
        return False
    if fault is not None:
        return fault.message != error.get("message")
    return any(exit.killed for exit in exits if exit.rank)


def end_of_log(log: Path) -> str:
    """The last lines of what a trainer printed; empty where there is no log."""
    try:
        with log.open("rb") as file:
            file.seek(max(file.seek(0, 2) - _TAIL_BYTES, 0))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-_TAIL_LINES:])


def _read_fault(segment: SegmentDir, attempt: int, rank: int) -> RankFault | None:
    try:
        fields: dict[str, Any] = json.loads(segment.fault(attempt, rank).read_text(encoding="utf-8"))
        if fields["exit_code"] not in _FAULTS:
            return None
        code, message = str(fields["code"]), str(fields["message"])
        return RankFault(rank, code, message, fields.get("hint"), segment.log(attempt, rank))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # What a dying process left decides nothing by being damaged: its exit code still speaks.


def _likely_cause(exit: RankExit) -> tuple[bool, bool, int]:
    """Sorts what happened by itself before what was done here, and signals before codes."""
    return not exit.left, (exit.status or 0) >= 0, exit.rank


def _how(status: int | None) -> str:
    if status is None:
        return "still running"
    return f"signal {-status}" if status < 0 else f"exit code {int(status)}"
