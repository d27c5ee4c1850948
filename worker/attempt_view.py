"""What this attempt's trainer has said so far, read from the journal itself: it works while the database is away."""

from __future__ import annotations

import time
from typing import Any

from ppo_core.rundir import SegmentDir, read_journal

# Until the first phase is announced: an interpreter has to start, on a busy machine.
START_DEADLINE_S = 300.0


class AttemptView:
    """Follows the journal from where it ended before the attempt began."""

    def __init__(self, segment: SegmentDir) -> None:
        self._journal = segment.journal
        self._offset = 0
        while True:
            _, offset = read_journal(self._journal, self._offset)
            if offset == self._offset:
                break
            self._offset = offset
        self.started = False
        self.phase: str | None = None
        self.end: dict[str, Any] | None = None
        self.iteration: int | None = None
        self.saved_iteration: int | None = None
        self._spoke_at = time.monotonic()
        self._deadline_s = START_DEADLINE_S

    def read(self) -> None:
        """Take in new lines."""
        while True:
            events, offset = read_journal(self._journal, self._offset)
            if offset == self._offset:
                return
            self._offset = offset
            for event in events:
                self._spoke_at = time.monotonic()
                if event.type == "started":
                    self.started = True
                elif event.type == "phase":
                    self.phase = str(event.payload.get("phase"))
                    self._deadline_s = float(event.payload.get("deadline_s") or START_DEADLINE_S)
                elif event.type == "metrics":
                    self.iteration = event.iteration
                elif event.type == "checkpoint":
                    self.saved_iteration = event.iteration
                elif event.type == "end":
                    self.end = event.payload

    def stalled(self) -> str | None:
        """A sentence once the trainer has been silent for twice what it announced for its phase.

        At the announced time the run's health is late; twice that is far outside what the trainer expected.
        """
        silent_s = time.monotonic() - self._spoke_at
        if silent_s <= 2 * self._deadline_s:
            return None
        phase = self.phase or "starting"
        return (
            f"no sign of life for {silent_s:.0f} s in phase {phase}, which was to take at most {self._deadline_s:.0f} s"
        )


def last_word(segment: SegmentDir, token: int) -> dict[str, Any] | None:
    """The `end` of the attempt that held `token`, if it left one."""
    offset, speaker, end = 0, None, None
    while True:
        events, after = read_journal(segment.journal, offset)
        if after == offset:
            return end if speaker == token else None
        offset = after
        for event in events:
            if event.type == "started":
                speaker, end = event.payload.get("token"), None
            elif event.type == "end":
                end = event.payload
