"""Specs at the edges, and everything at once: counts are right, and a restart changes no bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ppo_core.main import run_segment
from ppo_core.rundir import ControlCommand, ExitCode, SegmentDir, checkpoints, send_command
from tests.ppo_core.toy_run import journal, make_toy, timeless, toy_segment

pytestmark = pytest.mark.runs

EVERYTHING: dict[str, Any] = {
    "policy": {"value_head": "separate", "lora": {"rank": 4, "alpha": 8}, "gradient_checkpointing": True},
    "kl": {"controller": "adaptive", "coef": 0.1, "target": 0.02, "horizon": 16},
    "reward": {"normalize": True, "length_baseline": "linear", "clip": 3.0},
    "rollout": {"top_k": 20, "renormalize": True},
    "update": {"pack_rows": True, "critic_warmup_iterations": 1, "target_kl": 10.0, "lr_schedule": "cosine"},
}
BFLOAT16 = {**EVERYTHING, "policy": {**EVERYTHING["policy"], "dtype": "bfloat16"}}
SPECS: dict[str, tuple[dict[str, Any], int]] = {  # with the optimizer steps of an iteration
    "everything": (EVERYTHING, 4),
    "everything in bfloat16": (BFLOAT16, 4),
    "one token": ({"rollout": {"max_new_tokens": 1}}, 4),
    "a batch of one": ({"rollout": {"batch_size": 1}, "update": {"minibatches": 1}, "reward": {"normalize": True}}, 2),
    "a batch of three": ({"rollout": {"batch_size": 3}}, 4),
    "a step a row": ({"update": {"minibatches": 8}}, 16),
    "a target that every step passes": ({"update": {"target_kl": 1e-9}}, 2),
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    made = make_toy(tmp_path_factory.mktemp("toy"))
    made["rollout"]["stop_ids"] = list(range(10, 50))  # responses of one to eight tokens
    made["data"]["held_out"] = None
    return {**made, "checkpoints": {"every": 1, "keep_last": -1}}


def metrics_of(segment: SegmentDir) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for event in journal(segment, "metrics"):
        found.setdefault(event.iteration, {}).update(timeless(event.payload))
    return found


@pytest.mark.parametrize("name", SPECS)
def test_counts_are_right_and_a_restart_changes_no_bit(toy: dict[str, Any], tmp_path: Path, name: str) -> None:
    groups, num_steps = SPECS[name]
    spec = copy.deepcopy(toy)
    for group, fields in groups.items():
        spec[group] = {**spec.get(group, {}), **fields}
    straight, stopped = toy_segment(tmp_path / "straight", spec), toy_segment(tmp_path / "stopped", spec)

    def stop(trainer: Any) -> None:
        generate = trainer.models.engine.generate

        def asking(*args: Any, **kwargs: Any) -> Any:
            if trainer.control.iteration == 2:
                send_command(stopped, ControlCommand("c-1", "stop", 1))
            return generate(*args, **kwargs)

        trainer.models.engine.generate = asking

    assert run_segment(straight, token=0, attempt=1) == ExitCode.DONE
    assert run_segment(stopped, token=1, attempt=1, change=stop) == ExitCode.STOPPED
    assert run_segment(stopped, token=2, attempt=2) == ExitCode.DONE
    metrics, batch = metrics_of(straight), spec["rollout"]["batch_size"]
    for iteration in (1, 2, 3):
        assert metrics[iteration]["optimizer/steps"] == num_steps
        assert metrics[iteration]["optimizer/skipped"] == metrics[iteration]["optimizer/empty_minibatches"] == 0
        assert metrics[iteration]["data/prompts_trained"] == batch * iteration
        assert "nonfinite" not in metrics[iteration]
    assert metrics_of(stopped) == metrics
    one, other = (load_file(checkpoints(each)[-1] / "state" / "rank-0000.safetensors") for each in (straight, stopped))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
