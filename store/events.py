"""The run's history: events with a gapless `seq` per run, announced when their transaction commits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import func, insert, text, update
from sqlalchemy.orm import Session

from store.models import Run, RunEvent
from store.storable import storable_json

CHANNEL = "ppo_events"


class RunNotFound(Exception):
    """There is no run of this id."""

    def __init__(self, run_id: str) -> None:
        super().__init__(f"There is no run {run_id!r}.")
        self.run_id = run_id


@dataclass(frozen=True)
class NewEvent:
    """An event without its `seq`; `time` is now where none is given."""

    type: str
    payload: Mapping[str, Any]
    segment: int
    iteration: int | None = None
    time: datetime | None = None
    actor: str | None = None


def append_events(session: Session, run_id: str, events: Sequence[NewEvent]) -> int:
    """Write events in order and announce the last; returns its `seq`. Locks the run's row until the commit.

    Raises:
        RunNotFound
    """
    statement = update(Run).where(Run.id == run_id).values(event_seq=Run.event_seq + len(events))
    # The identity map is left alone: callers refresh what they hand out.
    last = session.scalar(statement.returning(Run.event_seq), execution_options={"synchronize_session": False})
    if last is None:
        raise RunNotFound(run_id)
    if not events:
        return int(last)
    rows = [
        {
            "run_id": run_id,
            "seq": last - len(events) + 1 + index,
            "segment": event.segment,
            "type": event.type,
            "iteration": event.iteration,
            "time": event.time or func.now(),
            "actor": event.actor,
            "payload": storable_json(event.payload),
        }
        for index, event in enumerate(events)
    ]
    if any(event.time is None for event in events):  # now() is an expression, so these go one by one.
        for row in rows:
            session.execute(insert(RunEvent).values(row))
    else:
        session.execute(insert(RunEvent), rows)
    session.execute(text("SELECT pg_notify(:channel, :payload)"), {"channel": CHANNEL, "payload": f"{run_id}:{last}"})
    return int(last)


def append_event(
    session: Session,
    run_id: str,
    type: str,
    payload: Mapping[str, Any],
    *,
    segment: int,
    iteration: int | None = None,
    actor: str | None = None,
) -> int:
    """Write one event and announce it; returns its `seq`.

    Raises:
        RunNotFound
    """
    return append_events(session, run_id, [NewEvent(type, payload, segment, iteration, actor=actor)])
