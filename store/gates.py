"""The judge gates that were held in a run, as its journal told them. Only reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from store.metrics_read import Piece, active_line
from store.models import RunEvent


@dataclass(frozen=True)
class HeldGate:
    """A `gate` event, and whether it stands on the run's present line or was left behind by a roll back."""

    event: RunEvent
    is_active: bool


def held_gates(session: Session, run_id: str) -> list[HeldGate]:
    """Every gate of a run, the first first; one that a restart told again counts once."""
    statement = select(RunEvent).where(RunEvent.run_id == run_id, RunEvent.type == "gate").order_by(RunEvent.seq)
    by_place = {(event.segment, event.iteration): event for event in session.scalars(statement)}
    line = active_line(session, run_id)
    return [HeldGate(event, _is_on(line, event)) for event in by_place.values()]


def _is_on(line: Sequence[Piece], event: RunEvent) -> bool:
    return event.iteration is not None and any(
        piece.segment == event.segment and piece.first <= event.iteration <= piece.last for piece in line
    )
