"""Commands left for the trainer that holds a lease token, as small files."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from ppo_core.rundir.files import write_atomically
from ppo_core.rundir.segments import SegmentDir

CommandKind = Literal["stop", "pause", "checkpoint"]
SEVERITY: dict[str, int] = {"checkpoint": 0, "pause": 1, "stop": 2}


@dataclass(frozen=True)
class ControlCommand:
    """A command for the trainer that holds `token`."""

    id: str
    kind: CommandKind
    token: int


def send_command(segment: SegmentDir, command: ControlCommand) -> None:
    """Leave a command for the trainer that holds `command.token`."""
    segment.control.mkdir(parents=True, exist_ok=True)
    write_atomically(_path(segment, command.id, command.token), json.dumps(asdict(command)))


def withdraw_command(segment: SegmentDir, command_id: str, token: int) -> None:
    """Take a command back. A trainer that has not begun to act on it forgets it at its next look."""
    _path(segment, command_id, token).unlink(missing_ok=True)


def _path(segment: SegmentDir, command_id: str, token: int) -> Path:
    return segment.control / f"{token:08d}-{command_id}.json"


def read_commands(segment: SegmentDir, token: int) -> list[ControlCommand]:
    """Commands left for this token, oldest first; commands for other tokens are not for us."""
    found = []
    for path in segment.control.glob(f"{token:08d}-*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
            command = ControlCommand(**json.loads(path.read_text(encoding="utf-8")))
            if command.token == token and command.kind in SEVERITY:
                found.append((path.stat().st_mtime_ns, path.name, command))
    return [command for _, _, command in sorted(found, key=lambda each: each[:2])]
