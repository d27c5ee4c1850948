"""Supervisors with a fault of the platform planted in them: `python -m tests.faults.planted FAULT RUN_ID TOKEN`.

They show that the checker sees such faults. Each replaces one function of the real supervisor; production code has no
switch for it.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy.orm import Session

import store.leases
import worker.delivery
import worker.supervise
from ppo_core.rundir import Event
from store.models import Segment
from worker.attempt import Attempt
from worker.settings import read_settings
from worker.supervise import Supervisor


def speak_too_early() -> None:
    """The outcome is written before the processes that the trainer left are gone."""

    def over(attempt: Attempt) -> bool:
        attempt.exits = attempt.trainer.exits()
        attempt.view.read()
        return attempt.trainer.all_left()

    Attempt.over = over  # type: ignore[method-assign]
    Supervisor._end_now = lambda self, attempt: None  # type: ignore[method-assign]


def drop_a_batch() -> None:
    """What is delivered second never reaches the tables."""
    ingest, times = worker.delivery.ingest, [0]

    def forgetful(
        session: Session, run_id: str, segment: int, events: Sequence[Event], offset: int, **others: Any
    ) -> None:
        times[0] += 1
        if times[0] == 2:
            row = session.get_one(Segment, (run_id, segment), with_for_update=True)
            row.journal_seq, row.journal_offset = events[-1].seq, offset
            return
        ingest(session, run_id, segment, events, offset, **others)

    worker.delivery.ingest = forgetful


def ignore_the_fence() -> None:
    """Whoever holds the lease, this one goes on, and what it says counts."""
    renew = store.leases.renew

    def careless(session: Session, run_id: str, token: int, lease_s: float) -> None:
        with contextlib.suppress(worker.supervise.LeaseLost):
            renew(session, run_id, token, lease_s)

    store.leases.renew = careless
    worker.supervise.kill_marked = lambda run_id, up_to_token: []


FAULTS: dict[str, Callable[[], None]] = {
    "speak_too_early": speak_too_early,
    "drop_a_batch": drop_a_batch,
    "ignore_the_fence": ignore_the_fence,
}


def main() -> int:
    name, run_id, token = sys.argv[1:]
    if name != "none":
        FAULTS[name]()
    supervisor = Supervisor(read_settings(), run_id, int(token))
    signal.signal(signal.SIGTERM, supervisor.drain)
    return supervisor.run()


if __name__ == "__main__":
    sys.exit(main())
