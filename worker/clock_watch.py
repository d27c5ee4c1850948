"""Notices jumps of the database's clock, by which leases are measured, against this machine's monotonic one."""

from __future__ import annotations

import time
from datetime import datetime


class ClockWatch:
    """Remembers by how much the two clocks differed when they were last compared."""

    def __init__(self, tolerance_s: float) -> None:
        self._tolerance_s = tolerance_s
        self._offset_s: float | None = None

    def jumped(self, database_time: datetime) -> float | None:
        """By how many seconds the database's clock jumped since the last time, if by more than the tolerance.

        A process that stood still since it was told `database_time`, or a machine that slept, looks the same.
        """
        offset_s = database_time.timestamp() - time.monotonic()
        before, self._offset_s = self._offset_s, offset_s
        if before is None or abs(offset_s - before) <= self._tolerance_s:
            return None
        return offset_s - before
