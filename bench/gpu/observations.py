"""What was seen of one run on a GPU, as numbers: made where the run is, judged and printed elsewhere."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

GIB = 2**30


@dataclass(frozen=True)
class Sync:
    """One sync that the engine accepted: `digest` is that of what it received."""

    version: int
    digest: str
    probe_gap: float
    seconds: float


@dataclass(frozen=True)
class Sleep:
    """Bytes of the card that nobody held just before and just after the engine fell asleep."""

    free_awake: int
    free_asleep: int
    seconds: float


@dataclass(frozen=True)
class Observations:
    """One run with one train engine. Lists are in the order of iterations."""

    engine: str
    num_iterations: int  #: that were asked for
    exit_code: int | None  #: None: it had to be ended, or left no word
    error: str = ""
    transfer: str = ""  #: the way on which weights came
    share_bytes: int = 0  #: of the card, that the rollout engine may take
    metrics: list[dict[str, float | None]] = field(default_factory=list)
    syncs: list[Sync] = field(default_factory=list)
    sleeps: list[Sleep] = field(default_factory=list)
    trainer_digest: str = ""  #: of the trainer's weights after the run, hashed apart from any transfer
    num_left: int = 0  #: processes of the rollout engine that outlived the run
    loading_s: float = 0.0
    peak_gib: float = 0.0

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Observations:
        """What `write` has written."""
        said: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        said["syncs"] = [Sync(**each) for each in said["syncs"]]
        said["sleeps"] = [Sleep(**each) for each in said["sleeps"]]
        return cls(**said)

    def values(self, metric: str) -> list[float]:
        """A metric of every iteration that has it."""
        found = (each.get(metric) for each in self.metrics)
        return [value for value in found if value is not None]
