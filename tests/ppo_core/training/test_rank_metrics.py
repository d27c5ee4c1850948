"""Every metric of the registry, made by two ranks of a real process group, is what one process makes it.

A batch's rows are dealt out one by one, so two ranks differ by a row at most; what they hold differs far more: answers
of one token and of forty, and answers without a usable score. Left out are the metrics that tell of the machine's mood,
which no second run repeats either: `MOODS`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForSequenceClassification

from ppo_core.registry import METRICS, metric
from ppo_core.rundir import SegmentDir
from tests.ppo_core.rank_processes import run_all
from tests.ppo_core.tiny_models import tiny_config, tiny_tokenizer
from tests.ppo_core.toy_run import TOKENS, journal, make_toy, toy_segment
from tests.ppo_core.training.test_ranks import deepspeed, merged

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

MOODS = ("time/", "throughput/", "memory/", "limit/")
NEAR = 1e-5
BATCHES = {"many": 17, "three": 3}


def make_scorer(folder: Path, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    LlamaForSequenceClassification(tiny_config("llama", vocab_size=TOKENS, num_labels=1)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return {"kind": "sequence_classifier", "model": str(folder)}


def metrics_of(segment: SegmentDir) -> dict[tuple[int, str], float | None]:
    """By iteration and name; what an iteration and its gate say lies in events of its own."""
    return {
        (event.iteration, name): value
        for event in journal(segment, "metrics")
        for name, value in event.payload.items()
        if not name.startswith(MOODS)
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[SegmentDir, SegmentDir]]:
    """For each size of batch one process's run and two ranks', with all on that has a metric."""
    folder = tmp_path_factory.mktemp("metrics")
    (folder / "toy").mkdir()
    toy = make_toy(folder / "toy")
    second, judge = (make_scorer(folder / name, seed) for name, seed in (("second", 2), ("judge", 3)))
    spec = merged(
        toy,
        {
            "iterations": 4,
            "data": {"max_prompt_tokens": 20},
            # Some texts are longer than the reward models read: answers without a score, more on one rank.
            "reward": {
                "sources": [*toy["reward"]["sources"], {**second, "weight": 0.5}],
                "max_invalid_share": 0.9,
                "normalize": True,
                "length_baseline": "linear",
            },
            "kl": {"controller": "adaptive", "target": 0.5, "horizon": 100},
            # Many ids end an answer: lengths from 1 to 40.
            "rollout": {"max_new_tokens": 40, "stop_ids": list(range(20, 34))},
            "update": {"minibatches": 3, "token_budget": 64, "value_learning_rate": 2e-3},
            "gate": {"judge": judge, "action": "note"},
        },
    )
    alone, together = {}, {}
    for name, batch in BATCHES.items():
        sized = merged(spec, {"rollout": {"batch_size": batch}})
        alone[name] = toy_segment(folder / name, sized)
        together[name] = toy_segment(folder / f"{name}-2", {**sized, "training": deepspeed(0)})
    run_all(list(alone.values()), 1, folder / "alone")
    run_all(list(together.values()), 2, folder / "together")
    return {name: (alone[name], together[name]) for name in BATCHES}


@pytest.mark.parametrize("batch", BATCHES)
def test_two_uneven_ranks_report_what_one_process_does(
    runs: dict[str, tuple[SegmentDir, SegmentDir]], batch: str
) -> None:
    """Means and rates, and percentiles, maxima and deviations too."""
    one, two = (metrics_of(segment) for segment in runs[batch])
    assert two.keys() == one.keys()
    expected = {at: None if value is None else pytest.approx(value, abs=NEAR, rel=NEAR) for at, value in one.items()}
    assert {at: (value, expected[at]) for at, value in two.items() if value != expected[at]} == {}


def test_every_metric_of_the_registry_was_compared(runs: dict[str, tuple[SegmentDir, SegmentDir]]) -> None:
    """With a value, not only as undefined."""
    compared = {metric(name).name for (_, name), value in metrics_of(runs["many"][0]).items() if value is not None}
    assert set(METRICS) - compared == {name for name in METRICS if name.startswith(MOODS)}


def test_the_ranks_are_uneven(runs: dict[str, tuple[SegmentDir, SegmentDir]]) -> None:
    many, three = ([event.payload for event in journal(runs[name][1], "shares")] for name in BATCHES)
    assert [[len(own) for own in share["prompts"]] for share in many] == [[9, 8]] * 4
    assert [[len(own) for own in share["prompts"]] for share in three] == [[2, 1]] * 4
    tokens = [share["response_tokens"] for share in (*many, *three)]
    assert any(max(own) > 1.2 * min(own) for own in tokens), tokens
