"""Brings a segment's journal into Postgres, some of it at a time."""

from __future__ import annotations

from sqlalchemy.orm import Session, sessionmaker

from ppo_core.rundir import SegmentDir, read_journal
from store.journal import ingest, journal_position

# One transaction's worth, some iterations: between two of them a lease can be renewed, and after the database
# was away everybody delivers at once, on a machine that has other work.
BATCH_BYTES = 64 * 1024


class Delivery:
    """One segment's journal. What was stored is known by the database, so this may be made anew at any time."""

    def __init__(self, sessions: sessionmaker[Session], run_id: str, number: int, folder: SegmentDir) -> None:
        self._sessions = sessions
        self._run_id = run_id
        self._number = number
        self._folder = folder
        self._delivered: int | None = None

    def step(self, token: int) -> bool:
        """Deliver some lines in a transaction of its own; True if there may be more. Cheap when nothing is new.

        Raises:
            RunDirectoryError: the journal cannot be read.
        """
        if self._delivered is not None and self._size() <= self._delivered:
            return False
        with self._sessions.begin() as session:
            _, offset = journal_position(session, self._run_id, self._number)
            events, end = read_journal(self._folder.journal, offset, BATCH_BYTES)
            if events:
                ingest(session, self._run_id, self._number, events, end, token=token, folder=self._folder)
        # A torn last line makes the file longer than what was delivered; it is looked at again, which costs little.
        self._delivered = end
        return bool(events)

    def all(self, token: int) -> None:
        """Deliver what there is."""
        while self.step(token):
            pass

    def _size(self) -> int:
        try:
            return self._folder.journal.stat().st_size
        except FileNotFoundError:
            return 0
