"""`data.seed`: another order of prompts and other draws from a checkpoint on, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ppo_core.main import run_segment
from ppo_core.rundir import ExitCode, SegmentDir
from tests.ppo_core.toy_run import journal, make_toy, timeless, toy_segment


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The toy with some prompts too long, adapters, and every response kept."""
    folder = tmp_path_factory.mktemp("toy")
    toy = make_toy(folder)
    with (folder / "train.jsonl").open("a") as file:
        for number in range(8):
            file.write(json.dumps({"prompt": f"long {number} " * 8}) + "\n")
    toy["policy"] |= {"lora": {"rank": 2}}
    return {**toy, "iterations": 4, "samples": {"per_iteration": 8}, "evaluation": {"every": 1, "prompts": 4}}


@pytest.fixture(scope="module")
def straight(toy: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> SegmentDir:
    segment = toy_segment(tmp_path_factory.mktemp("run"), toy)
    assert run_segment(segment, token=0, attempt=1) == ExitCode.DONE
    return segment


def with_data_seed(toy: dict[str, Any], seed: int | None) -> dict[str, Any]:
    return {**toy, "data": {**toy["data"], "seed": seed}}


def rolled_back(straight: SegmentDir, run_dir: Path, spec: dict[str, Any]) -> SegmentDir:
    segment = toy_segment(run_dir, spec, number=2, checkpoint=str(straight.checkpoint(2)))
    assert run_segment(segment, token=0, attempt=1) == ExitCode.DONE
    return segment


def metrics_of(segment: SegmentDir, iteration: int) -> dict[str, Any]:
    told = [event.payload for event in journal(segment, "metrics") if event.iteration == iteration]
    return timeless({name: value for payload in told for name, value in payload.items()})


def samples_of(segment: SegmentDir, iteration: int, kind: str = "train") -> list[dict[str, Any]]:
    lines = (segment.samples / f"iter-{iteration:06d}-{kind}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_runs_own_seed_written_out_changes_nothing(
    toy: dict[str, Any], straight: SegmentDir, tmp_path: Path
) -> None:
    again = rolled_back(straight, tmp_path, with_data_seed(toy, 1))
    for iteration in (3, 4):
        assert metrics_of(again, iteration) == metrics_of(straight, iteration)
        assert samples_of(again, iteration) == samples_of(straight, iteration)


def test_another_one_gives_other_prompts_and_draws_and_keeps_the_rest(
    toy: dict[str, Any], straight: SegmentDir, tmp_path: Path
) -> None:
    """The count of prompts goes on without a loss; adapters and held-out answers have the run's own seed."""
    other = rolled_back(straight, tmp_path / "other", with_data_seed(toy, 2))
    prompts, before = ([row["prompt"] for row in samples_of(each, 3)] for each in (other, straight))
    assert prompts != before
    assert metrics_of(other, 4)["reward/score_mean"] != metrics_of(straight, 4)["reward/score_mean"]
    for iteration in (3, 4):
        now, then = metrics_of(other, iteration), metrics_of(other, iteration - 1) or metrics_of(straight, 2)
        assert now["data/prompts_trained"] == iteration * 8
        assert now["data/prompts_filtered"] >= then["data/prompts_filtered"]
    start = toy_segment(tmp_path / "start", {**with_data_seed(toy, 2), "iterations": 1})
    assert run_segment(start, token=0, attempt=1) == ExitCode.DONE
    assert samples_of(start, 0, "held_out") == samples_of(straight, 0, "held_out")
    assert samples_of(start, 1) != samples_of(straight, 1)
