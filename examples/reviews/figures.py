"""What runs of the example achieved, measured on their own journals: `python -m examples.reviews.figures RUN_DIR...`

For each run directory (one a seed) it compares the held-out answers of the untrained policy (iteration 0) with those
of the last iteration, prints a Markdown table, and says which of the example's promises hold. Its exit status is 1
if one is broken. It reads files only, and loads no model.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppo_core.diagnostics.text import distinct_word_share, most_common_share, words
from ppo_core.rundir import Event, SegmentDir, all_events, segments


@dataclass(frozen=True)
class Promise:
    """One line of the table: a figure and the bound that it keeps."""

    name: str
    bound: str
    value: float
    holds: bool
    shown: str


@dataclass(frozen=True)
class HeldOut:
    """The held-out answers of one iteration, and its metrics."""

    responses: list[str]
    metrics: dict[str, Any]


def run_events(run_dir: Path) -> tuple[SegmentDir, list[Event]]:
    """The newest segment of a run directory, and its journal."""
    found = segments(run_dir)
    if not found:
        raise SystemExit(f"{run_dir} is no run directory: it holds no segment")
    return found[-1], list(all_events(found[-1].journal))


def held_out(segment: SegmentDir, events: list[Event], iteration: int) -> HeldOut:
    """What the policy answered after `iteration`."""
    metrics = {
        name: value
        for event in events
        if event.type == "metrics" and event.iteration == iteration
        for name, value in event.payload.items()
    }
    for event in events:
        if event.type == "samples" and event.iteration == iteration:
            lines = (segment.path / event.payload["path"]).read_text(encoding="utf-8").splitlines()
            rows = [json.loads(line) for line in lines]
            responses = [row["response"] for row in rows if row["kind"] == "held_out"]
            if responses:
                return HeldOut(responses, metrics)
    raise SystemExit(f"{segment.path} has no held-out answers of iteration {iteration}")


def promises(start: HeldOut, end: HeldOut) -> list[Promise]:
    """The example's promises, with what was measured."""

    def gained(name: str) -> float:
        return float(end.metrics[name] - start.metrics[name])

    rise = gained("heldout/score_mean") / float(start.metrics["heldout/score_std"])
    count = min(len([word for text in held.responses for word in words(text)]) for held in (start, end))
    shares = [distinct_word_share(held.responses, count) or 0.0 for held in (start, end)]
    variety = shares[1] / shares[0] if shares[0] else 0.0
    length = float(end.metrics["heldout/length_mean"] / start.metrics["heldout/length_mean"])
    ended = gained("heldout/eos_rate")
    repeated = most_common_share(end.responses) or 0.0
    judge = gained("judge/score_mean")
    return [
        Promise("held-out reward, rise in sd of the untrained scores", "≥ 1.2", rise, rise >= 1.2, f"{rise:.2f}"),
        Promise("judge's mean, rise", "> 0", judge, judge > 0, f"{judge:+.3f}"),
        Promise("distinct words, share of the untrained", "≥ 85 %", variety, variety >= 0.85, f"{variety:.1%}"),
        Promise("mean length, share of the untrained", "≥ 60 %", length, length >= 0.6, f"{length:.1%}"),
        Promise("EOS rate, change", "≥ 0", ended, ended >= 0, f"{ended:+.3f}"),
        Promise("most frequent answer, share", "≤ 5 %", repeated, repeated <= 0.05, f"{repeated:.1%}"),
    ]


def measure(run_dir: Path) -> tuple[str, list[Promise], dict[str, float]]:
    """The seed, the promises, and a few more figures of one run."""
    segment, events = run_events(run_dir)
    last = max(event.iteration for event in events if event.type == "metrics")
    start, end = held_out(segment, events, 0), held_out(segment, events, last)
    final: dict[str, Any] = {}
    seconds = 0.0
    for event in events:
        if event.type == "metrics" and event.iteration > 0:
            final.update(event.payload)
            seconds += event.payload.get("time/iteration_s") or 0.0
    more = {
        "KL to the reference, nats a sequence": final["kl/ref_sequence"],
        "entropy, nats a token": final["policy/entropy"],
        "explained variance": final["value/explained_variance"],
        "seconds of PPO": seconds,
    }
    return str(segment.read_start().spec["seed"]), promises(start, end), more


def table(found: list[tuple[str, list[Promise], dict[str, float]]]) -> str:
    """A Markdown table with a column a seed."""
    lines = ["| | bound | " + " | ".join(f"seed {seed}" for seed, _, _ in found) + " |"]
    lines.append("|---|---|" + "---|" * len(found))
    for row in zip(*(kept for _, kept, _ in found), strict=True):
        shown = " | ".join(promise.shown + ("" if promise.holds else " ✗") for promise in row)
        lines.append(f"| {row[0].name} | {row[0].bound} | {shown} |")
    for name in found[0][2]:
        lines.append(f"| {name} | | " + " | ".join(f"{more[name]:.3g}" for _, _, more in found) + " |")
    return "\n".join(lines)


def main() -> int:
    folders = [Path(argument) for argument in sys.argv[1:]]
    if not folders:
        raise SystemExit("usage: python -m examples.reviews.figures RUN_DIR...")
    found = [measure(folder) for folder in folders]
    print(table(found))
    return 0 if all(promise.holds for _, kept, _ in found for promise in kept) else 1


if __name__ == "__main__":
    raise SystemExit(main())
