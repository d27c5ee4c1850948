"""What a trainer found before its first iteration, as its journal told it. Only reads."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from store.models import RunEvent


def last_preflight(session: Session, run_id: str) -> RunEvent | None:
    """The newest `preflight` event of a run."""
    return session.scalar(
        select(RunEvent)
        .where(RunEvent.run_id == run_id, RunEvent.type == "preflight")
        .order_by(RunEvent.seq.desc())
        .limit(1)
    )
