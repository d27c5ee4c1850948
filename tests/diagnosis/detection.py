"""Which story each planted fault has to raise first, and by when; what runs told; and whether that is right.

What was seen is kept as JSON lines in `seen.jsonl` beside this file where PPO_DETECTIONS says so; `report` makes the
tables of docs/diagnosis.md of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

SEEN = Path(__file__).with_name("seen.jsonl")
KEPT_IN = "PPO_DETECTIONS"
SEEDS = range(1, 6)
ITERATIONS = 60  # of a toy with a fault
HEALTHY_ITERATIONS = 200


@dataclass(frozen=True)
class Planted:
    """A fault, what it is in words, the story that is right, and by which iteration it has to be the first."""

    fault: str
    how: str
    within: int
    since: int = 1  #: the iteration that the fault is there from


FAULTS = (
    Planted("off_by_one", "every logprob is its neighbour's", 20),
    Planted("padding_in_averages", "means of token tensors over padding, too", 20),
    Planted("engine_logprobs", "engine logprobs as old ones", 20),
    Planted("weights_out_of_sync", "the engine never takes new weights", 20),
    Planted("critic_not_learning", "no gradient reaches the critic", 55),
    Planted(
        "out_of_memory_in_generation", "no more than 20 of 32 rows fit at once, from iteration 25 on", 35, since=25
    ),
    Planted("too_many_epochs", "twelve epochs at a high rate", 20),
    Planted("length_hacking", "a reward for length, `kl.coef` 0.01", 40),
    Planted("reward_hacking", "a reward for the share of vowels, `kl.coef` 0", 55),
    Planted("generation_cut_off", "answers cut after three tokens, from iteration 25 on", 40, since=25),
)
HEALTHY = {
    "keyword toy": "a random policy, rewarded for a letter, batches of 64, without a judge",
    "reviews": "`examples/reviews`",
    "reviews, separate critic": "`examples/reviews` with `policy.value_head=separate`",
}


@dataclass(frozen=True)
class Told:
    """What one run told of itself: rules of the alerts that were raised, with their iterations, in order."""

    kind: str
    seed: int
    state: str
    iterations: int
    gates: int  #: how often the judge was asked
    raised: tuple[tuple[str, int], ...]

    @property
    def stories(self) -> list[tuple[str, int]]:
        """By name, with the iteration."""
        return [(rule.removeprefix("story:"), at) for rule, at in self.raised if rule.startswith("story:")]

    @property
    def num_bands(self) -> int:
        return sum(rule.startswith("band:") for rule, _ in self.raised)

    @property
    def gate_tripped(self) -> bool:
        return any(rule.startswith("gate:") for rule, _ in self.raised)

    def finds(self, planted: Planted) -> bool:
        """Whether the first story is the right one, after the fault began and in time."""
        return bool(self.stories) and self.stories[0][0] == planted.fault and self.stories[0][1] <= planted.within


def told_by(kind: str, seed: int, state: str, events: Iterable[Any]) -> Told:
    """What a run's journal tells.

    Args:
        events: of `ppo_core.rundir`, in order.
    """
    metrics, gates, raised = 0, 0, []
    for event in events:
        if event.type == "metrics":
            metrics = max(metrics, event.iteration)
        elif event.type == "gate":
            gates += 1
        elif event.type == "alert" and event.payload["status"] == "raised":
            raised.append((event.payload["rule"], event.iteration))
    return Told(kind, seed, state, metrics, gates, tuple(raised))


def keep(told: Told) -> None:
    """Add to what is kept, where it is."""
    path = os.environ.get(KEPT_IN)
    if path:
        today = datetime.now(UTC).date().isoformat()
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({**asdict(told), "date": today}) + "\n")


def read_seen(path: Path = SEEN) -> list[tuple[Told, str]]:
    """All that was kept, each with its date; none where there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [_told(json.loads(line)) for line in lines]


def _told(line: Mapping[str, Any]) -> tuple[Told, str]:
    fields = dict(line)
    date = fields.pop("date")
    return Told(**{**fields, "raised": tuple((rule, at) for rule, at in fields["raised"])}), date


def unseen(kind: str) -> list[int]:
    """Seeds of a kind that are not kept yet."""
    path = os.environ.get(KEPT_IN)
    there = {told.seed for told, _ in (read_seen(Path(path)) if path else []) if told.kind == kind}
    return [seed for seed in SEEDS if seed not in there]
