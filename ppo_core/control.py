"""What is asked of the trainer from outside: command files and SIGTERM. It answers in the journal."""

from __future__ import annotations

import signal
import time
from types import FrameType

from ppo_core.ranks import ALONE, Interruption, Ranks
from ppo_core.rundir import SEVERITY, ControlCommand, Journal, SegmentDir, read_commands

LOOK_EVERY_S = 0.1


class Interrupted(Interruption):
    """The iteration under way is given up: a stop or pause was asked before its update began."""


class Control:
    """Looks for commands of this trainer's lease token: between iterations, and within one every tenth of a second.

    With several ranks each looks by itself while it generates, and rank 0 looks for all where they move in step. What
    is done about a command is rank 0's word alone; SIGTERM to any of them is one to all.
    """

    def __init__(self, segment: SegmentDir, token: int, journal: Journal, ranks: Ranks = ALONE) -> None:
        self._segment = segment
        self._token = token
        self._journal = journal
        self._ranks = ranks
        self._looked_at = 0.0
        self._commands: dict[str, ControlCommand] = {}
        self._done: set[str] = set()
        self._terminated = False
        self.iteration = 0

    def listen_to_sigterm(self) -> None:
        """From now on SIGTERM asks for a stop with a checkpoint."""

        def remember(signum: int, frame: FrameType | None) -> None:
            self._terminated = True

        signal.signal(signal.SIGTERM, remember)

    def wants_to_end(self) -> str | None:
        """ "stop" or "pause" when one was asked, the more severe of several; None otherwise. The same on all ranks."""
        # Else a rank that was sent one by itself would give up every iteration, and rank 0 begin it again.
        self._terminated = any(self._ranks.gather(self._terminated))
        return self._ranks.first(self._asked)

    def _asked(self) -> str | None:
        self._look()
        if self._terminated:
            return "stop"
        asked = [command.kind for command in self._commands.values() if SEVERITY[command.kind] > 0]
        return max(asked, key=lambda kind: SEVERITY[kind], default=None)

    def check(self) -> None:
        """Called once a generation step, by each rank for itself.

        Raises:
            Interrupted: a stop or pause was asked.
        """
        if time.monotonic() - self._looked_at >= LOOK_EVERY_S and self._asked() is not None:
            raise Interrupted

    def check_together(self) -> None:
        """Called once a microbatch before the update, by all ranks at the same place.

        Raises:
            Interrupted: on all ranks, where rank 0 sees that a stop or pause was asked.
        """
        self._ranks.first(self.check)

    def wants_checkpoint(self) -> bool:
        """Whether one was asked for; the caller saves and then calls `done`. The same on all ranks."""
        return self._ranks.first(self._checkpoint_asked)

    def _checkpoint_asked(self) -> bool:
        self._look()
        return any(command.kind == "checkpoint" for command in self._commands.values())

    def done(self, *kinds: str) -> None:
        """Answer every open command of these kinds: it has been done."""
        for command in list(self._commands.values()):
            if command.kind in kinds:
                self._ack(command, "done")
                del self._commands[command.id]
                self._done.add(command.id)

    def _look(self) -> None:
        self._looked_at = time.monotonic()
        found = read_commands(self._segment, self._token)
        for withdrawn in self._commands.keys() - {command.id for command in found}:
            del self._commands[withdrawn]
        for command in found:
            if command.id not in self._commands and command.id not in self._done:
                self._commands[command.id] = command
                self._ack(command, "accepted")

    def _ack(self, command: ControlCommand, status: str) -> None:
        self._journal.append(
            "ack", self.iteration, {"command": command.id, "kind": command.kind, "status": status, "detail": None}
        )
