"""What a spec may say, and specs to begin with."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from api.auth import least
from api.deps import Settings
from api.schemas import Page, Preset
from api.specs import presets
from ppo_core.spec import spec_schema

router = APIRouter(prefix="/v1/spec", tags=["spec"])


@router.get("/schema", openapi_extra=least("viewer"))
def read_spec_schema() -> dict[str, Any]:
    """JSON schema of a run spec: bounds, descriptions, and when each field may change."""
    return spec_schema()


@router.get("/presets", openapi_extra=least("viewer"))
def list_presets(settings: Settings) -> Page[Preset]:
    """Specs of the examples found under the configured folders."""
    return Page[Preset](items=presets(settings.roots))
