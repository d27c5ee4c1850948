"""What every field and group of a run spec is made of: a described, bounded value with a rule for when it may change.

`changeable` says when a stored run may take another value: "rollback" (a new segment of the same run), "fork" (only a
new run), "never" (it names the run).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Changeable = Literal["rollback", "fork", "never"]


def setting(default: Any, changeable: Changeable, description: str, *, path: bool = False, **bounds: Any) -> Any:
    """A spec field. `path` marks text that names a file, a folder or a hub id."""
    extra: dict[str, Any] = {"changeable": changeable}
    if path:
        extra["path"] = True
    return Field(default, description=description, json_schema_extra=extra, **bounds)


class Misfits(ValueError):
    """Fields that are fine alone and do not fit together: (pointer below the group that was checked, message) each."""

    def __init__(self, places: Iterable[tuple[str, str]]) -> None:
        self.places = tuple(places)
        super().__init__("; ".join(message for _, message in self.places))


class Group(BaseModel):
    """Base of every group: unknown fields fail, values never change after checking, non-finite numbers are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


PathText = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[^\x00-\x1f]+$")]
