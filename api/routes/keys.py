"""Bearer keys for machines."""

from __future__ import annotations

from fastapi import APIRouter

from api.auth import least
from api.deps import Database, Who
from api.errors import not_found
from api.schemas import Key, KeyBody, NewKey, Page
from store import audit, keys

router = APIRouter(prefix="/v1/api-keys", tags=["keys"])


@router.get("", openapi_extra=least("admin"))
def list_keys(database: Database) -> Page[Key]:
    """All keys, revoked ones too, without their secrets."""
    return Page[Key](items=[Key.model_validate(row) for row in keys.list_keys(database)])


@router.post("", status_code=201, openapi_extra=least("admin"))
def create_key(body: KeyBody, database: Database, who: Who) -> NewKey:
    """Make a key. It is shown in this answer and never again."""
    row, key = keys.create_key(database, body.name, body.role, body.expires_at)
    audit.record(database, who.name, "key.create", row.id, role=body.role)
    database.commit()
    return NewKey(**Key.model_validate(row).model_dump(), key=key)


@router.delete("/{key_id}", status_code=204, openapi_extra=least("admin"))
def revoke_key(key_id: str, database: Database, who: Who) -> None:
    """End a key's use at once."""
    if not keys.revoke_key(database, key_id):
        raise not_found("key", key_id)
    audit.record(database, who.name, "key.revoke", key_id)
    database.commit()
