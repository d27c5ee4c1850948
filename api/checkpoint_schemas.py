"""What travels about checkpoints beside the checkpoint itself (`api.schemas.Checkpoint`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from api.schemas import Body, Message

LONGEST_LABEL = 200


class CheckpointChange(Body):
    """What a person may change of a checkpoint; a field that is left out stays as it is."""

    pinned: bool | None = Field(None, description="A pinned one is never removed.")
    label: str | None = Field(None, max_length=LONGEST_LABEL, description="A name for people; null takes it away.")

    @field_validator("label")
    @classmethod
    def _a_line(cls, label: str | None) -> str | None:
        if label is not None and not label.isprintable():
            raise ValueError("the label holds a line break or another control character")
        return (label or "").strip() or None

    @model_validator(mode="after")
    def _something(self) -> CheckpointChange:
        if not self.model_fields_set:
            raise ValueError("give `pinned`, `label` or both")
        if "pinned" in self.model_fields_set and self.pinned is None:
            raise ValueError("`pinned` is true or false")
        return self


class Verification(Message):
    """What comparing every file of a checkpoint with its manifest gave."""

    ok: bool
    status: Literal["good", "damaged"]
    detail: str | None = Field(description="The first file that is not what the manifest says, and how.")
    files: int
    bytes: int
    seconds: float


class GcItem(Message):
    """What becomes of one checkpoint under the rules asked for, and why."""

    checkpoint: str
    segment: int
    iteration: int
    bytes: int
    stays: bool
    reasons: list[str]


class GcPreview(Message):
    """What pruning would do, newest first; nothing is done."""

    items: list[GcItem]
    freed_bytes: int
