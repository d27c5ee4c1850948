"""What travels about workers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from api.schemas import Message, Time
from store.states import State


class Slot(Message):
    """A place for a run: one GPU, or one of the worker's CPU slots."""

    kind: Literal["gpu", "cpu"]
    index: int
    device: str | None = Field(description="The GPU's name, where the worker could find it out.")
    memory_gib: float | None = Field(description="The GPU's memory.")
    run_id: str | None = Field(description="Who holds it; null: it is free.")
    run_name: str | None
    run_state: State | None


class Worker(Message):
    """A machine's worker."""

    id: str
    host: str
    state: Literal["active", "draining", "gone"] = Field(
        description="draining: it claims nothing and its runs go back into the queue; gone: it gives no sign of life."
    )
    cpu_slots: int
    gpus: int
    busy_slots: int
    slots: list[Slot]
    started_at: Time
    heartbeat_at: Time
    silent_s: float = Field(description="Age of its last sign of life when this was answered.")
    drain_asked_by: str | None = Field(description="Who drained it; null where nobody did.")
    drain_asked_at: Time | None
    data_shared: bool = Field(description="The service found in its own data folder what the worker left in its.")
    folder_fault: str | None = Field(
        description="What is wrong with the worker's data folder, and the remedy; it takes no run meanwhile."
    )
    version: str
