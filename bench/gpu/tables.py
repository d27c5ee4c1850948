"""What was seen as Markdown and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench.gpu.observations import GIB, Observations
from bench.gpu.promises import Promise

# Rows of the table of times, and the metrics that they are.
PHASES = {
    "rollout": "time/rollout_s",
    "scoring": "time/score_s",
    "logprobs": "time/logprobs_s",
    "update": "time/update_s",
    "sync": "time/sync_s",
    "whole iteration": "time/iteration_s",
}


def as_json(runs: Sequence[Observations], promises: Sequence[Promise], about: dict[str, str]) -> dict[str, Any]:
    """Everything: for another day's comparison."""
    return {
        "about": about,
        "promises": [asdict(promise) for promise in promises],
        "runs": [asdict(run) for run in runs],
    }


def as_markdown(runs: Sequence[Observations], promises: Sequence[Promise], about: dict[str, str]) -> str:
    """For people: what it ran on, the promises, and a table of times and memory."""
    facts = [f"- {name}: {value}" for name, value in about.items()]
    kept = _table(
        ["of", "promise", "found", "wanted", "kept"],
        [[each.of, each.text, _said(each.found), each.wanted, "yes" if each.is_kept else "NO"] for each in promises],
    )
    times = _table(["", *(run.engine for run in runs)], _rows(runs))
    note = "Seconds are medians over the iterations after the first, which also warms up."
    return "\n".join(["# One GPU", "", *facts, "", *kept, "", note, "", *times, ""])


def _rows(runs: Sequence[Observations]) -> list[list[str]]:
    def row(name: str, values: Sequence[Sequence[float]], digits: int = 2) -> list[str]:
        return [name, *(f"{_typical(each):.{digits}f}" if each else "none" for each in values)]

    return [
        row("loading and first sync, s", [[run.loading_s] for run in runs]),
        *(row(f"{phase}, s", [run.values(metric) for run in runs]) for phase, metric in PHASES.items()),
        row("falling asleep, s (part of the rollout)", [[each.seconds for each in run.sleeps] for run in runs]),
        row(
            "response tokens a second of the rollout",
            [run.values("throughput/response_tokens_per_s") for run in runs],
            0,
        ),
        row("share of the hardware's limit", [run.values("limit/fraction") for run in runs], 3),
        row("largest memory that the trainer reserved, GiB", [[run.peak_gib] for run in runs]),
        row("free while the engine is awake, GiB", [[each.free_awake / GIB for each in run.sleeps] for run in runs]),
        row("free while it sleeps, GiB", [[each.free_asleep / GIB for each in run.sleeps] for run in runs]),
    ]


def _typical(values: Sequence[float]) -> float:
    return statistics.median(values[1:] or values)


def _said(found: float | str | None) -> str:
    if found is None:
        return "nothing"
    return f"{found:.4g}" if isinstance(found, float) else str(found)[:200]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    # A cell is one line, and a bar in it is not the end of its column.
    lines = ([cell.replace("\n", " ").replace("|", "\\|") for cell in cells] for cells in rows)
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines)]
