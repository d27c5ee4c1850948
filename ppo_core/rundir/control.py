"""Commands left for the trainer that holds a lease token, as small files."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
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
    write_atomically(segment.control / f"{command.token:08d}-{command.id}.json", json.dumps(asdict(command)))


def read_commands(segment: SegmentDir, token: int) -> list[ControlCommand]:
    """Commands left for this token, oldest first; commands for other tokens are not for us."""
    found = []
    for path in segment.control.glob(f"{token:08d}-*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
            command = ControlCommand(**json.loads(path.read_text(encoding="utf-8")))
            if command.token == token and command.kind in SEVERITY:
                found.append((path.stat().st_mtime_ns, path.name, command))
    return [command for _, _, command in sorted(found, key=lambda each: each[:2])]
