"""Who changed what, written in the transaction of the change."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from store.models import AuditEntry


def record(session: Session, actor: str, action: str, target: str, **detail: Any) -> None:
    """Add one entry; it stands or falls with the change itself."""
    session.add(AuditEntry(actor=actor, action=action, target=target, detail=detail))
