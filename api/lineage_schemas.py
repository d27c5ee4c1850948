"""What travels over REST about going back: roll backs, forks, segments and lineage."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from api.schemas import Body, Checkpoint, Message, Time
from store.states import State

SegmentKind = Literal["start", "rollback", "recovery", "fork"]
MAX_SETTINGS = 200


class _Going(Body):
    checkpoint: str = Field(min_length=1, max_length=64, description="Id of the checkpoint to start from.")
    set: dict[str, Any] = Field(
        {}, max_length=MAX_SETTINGS, description='Changed fields by dotted name: {"kl.coef": 0.1}.'
    )
    reason: str | None = Field(None, max_length=2000, description="Why, for whoever reads the history.")

    @field_validator("checkpoint", "reason")
    @classmethod
    def _no_nul(cls, text: str | None) -> str | None:
        if text is not None and "\x00" in text:
            raise ValueError("holds a NUL character, which cannot be kept; leave it out")
        return text


class RollbackBody(_Going):
    """Where a run goes back to, and with which changed fields."""


class ForkBody(_Going):
    """Where a new run starts, and with which changed fields."""

    name: str | None = Field(
        None, min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]+$", description="The new run's name."
    )


class Change(Message):
    """A field of which the three values are not all the same."""

    path: str
    at_checkpoint: Any = Field(description="When the checkpoint was made.")
    now: Any = Field(description="In the run's present segment.")
    then: Any = Field(description="In the new segment.")
    changeable: Literal["rollback", "fork", "never"] = Field(description="When it may change at all.")


class LeftBehind(Message):
    """What a roll back takes off the run's present history. It stays stored, and can be gone back to."""

    segment: int = Field(description="The segment that the run is in now.")
    from_iteration: int
    to_iteration: int
    checkpoints: int = Field(description="How many good checkpoints lie there.")


class ForkPreview(Message):
    """What a fork would be, without making it."""

    checkpoint: Checkpoint
    spec: dict[str, Any]
    spec_yaml: str
    changes: list[Change]
    warnings: list[str]
    estimate: dict[str, Any]
    meaning: list[str] = Field(description="What the spec means in numbers, a sentence a line.")


class RollbackPreview(ForkPreview):
    """What a roll back would do, without doing it."""

    left_behind: LeftBehind | None = Field(description="Null when there is nothing after the checkpoint.")
    repeats_exactly: bool = Field(
        description="Nothing that alters numbers changes: it would do again, bit for bit, what followed the "
        "checkpoint. `data.seed` gives another order of prompts and other samples."
    )


class StartedFrom(Message):
    """The place in a history that a segment goes on from."""

    run_id: str
    segment: int
    iteration: int


class LineageSegment(Message):
    """An unbroken stretch of a run's history."""

    number: int
    kind: SegmentKind
    active: bool = Field(description="The one that the run is in.")
    start_iteration: int
    last_iteration: int = Field(description="The highest with metrics; the start's while there is none.")
    on_active_line: tuple[int, int] | None = Field(
        description="First and last of its iterations that belong to the present history; null when none does."
    )
    start_checkpoint: str | None
    started_from: StartedFrom | None
    created_at: Time
    created_by: str | None
    reason: str | None


class SettingChange(Message):
    """A field that a segment has another value of than the one it started from."""

    path: str
    before: Any
    after: Any


class Segment(LineageSegment):
    """A segment, with what was changed when it began."""

    changes: list[SettingChange]


class SegmentDetail(Segment):
    """A segment with its full effective spec."""

    spec: dict[str, Any]
    spec_yaml: str


class LineageRun(Message):
    """A run of a family, with its segments."""

    id: str
    name: str
    state: State
    segments: list[LineageSegment]


class Lineage(Message):
    """A run, those it was forked from, and its forks with theirs; the edges are the segments' `started_from`."""

    runs: list[LineageRun]
    complete: bool = Field(description="False where it has more runs than are sent; the youngest forks are left out.")
