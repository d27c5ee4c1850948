"""What was seen of faults, as JSON lines: one struck run each, with its repetition and the day.

It is kept where PPO_FAULT_OUTCOMES says, and nowhere without it. What is kept need not be played again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.faults.faults import Fault
from tests.faults.rounds import QUEUED, Outcome

OUTCOMES = Path(__file__).with_name("outcomes.jsonl")
KEPT_IN = "PPO_FAULT_OUTCOMES"


def read_outcomes(path: Path = OUTCOMES) -> list[dict[str, Any]]:
    """Every outcome written down, oldest first; none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def keep(outcomes: Sequence[Outcome], repetition: int) -> None:
    """Add outcomes to what is kept."""
    path = os.environ.get(KEPT_IN)
    if path:
        today = datetime.now(UTC).date().isoformat()
        lines = (json.dumps({**each.as_dict(), "repetition": repetition, "date": today}) for each in outcomes)
        with open(path, "a", encoding="utf-8") as file:
            file.write("".join(line + "\n" for line in lines))


def unseen_phases(fault: Fault, trainer: str, repetition: int) -> list[str]:
    """In which phases this repetition of a fault was not yet seen; `queued` for one that has none of its own."""
    path = os.environ.get(KEPT_IN)
    phases = ["iteration"] if trainer == "real" and fault.phases else fault.phases or [QUEUED]
    wanted = (fault.name, trainer, repetition)
    there = {
        line["phase"]
        for line in (read_outcomes(Path(path)) if path else [])
        if (line["fault"], line["trainer"], line["repetition"]) == wanted
    }
    return [phase for phase in phases if phase not in there]
