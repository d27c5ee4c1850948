"""The judge gates of a run."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import ValidationError

from api.auth import least
from api.deps import Database
from api.gate_schemas import Gate
from api.schemas import Page
from store import run_read
from store.gates import HeldGate, held_gates

router = APIRouter(prefix="/v1", tags=["gates"])


@router.get("/runs/{run_id}/gates", openapi_extra=least("viewer"))
def list_gates(run_id: str, database: Database) -> Page[Gate]:
    """Every gate that was held, the first first, those of abandoned segments too; all in one page."""
    run_read.known_run(database, run_id)
    return Page[Gate](items=[gate for held in held_gates(database, run_id) if (gate := _gate(held))], next=None)


def _gate(held: HeldGate) -> Gate | None:
    """A gate as a trainer told it; None for what is none."""
    event = held.event
    place = {"segment": event.segment, "iteration": event.iteration, "time": event.time, "active": held.is_active}
    try:
        return Gate.model_validate({**event.payload, **place})
    except ValidationError:
        return None
