"""What may not become a checkpoint."""

from __future__ import annotations

import json
import math
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ppo_core.checkpoints import SavedTensors
from ppo_core.errors import CheckpointError
from ppo_core.main import run_segment
from ppo_core.rundir import ExitCode, checkpoints, verify_checkpoint
from tests.ppo_core.toy_run import journal, make_toy, toy_segment


def test_weights_that_are_not_finite_are_never_written_and_cost_no_earlier_checkpoint(tmp_path: Path) -> None:
    """T21: facebookresearch/habitat-lab#2226. Poisoned behind every guard, in the last moment of iteration 2."""
    toy = make_toy(tmp_path)
    segment = toy_segment(tmp_path / "run", {**toy, "checkpoints": {"every": 1, "keep_last": 1}})

    def change(trainer: Any) -> None:
        save = trainer._save

        def poisoned(reason: str) -> None:
            if trainer.state.iteration == 2:
                with torch.no_grad():
                    trainer.models.trainer.policy.value_head.bias.fill_(math.nan)
            save(reason)

        trainer._save = poisoned

    assert run_segment(segment, token=0, attempt=1, change=change) == ExitCode.FAULT
    error = journal(segment, "end")[0].payload["error"]
    assert error["code"] == "checkpoint"
    assert "master/value_head.bias is not finite, so nothing was saved as" in error["message"]
    assert [path.name for path in segment.checkpoints.iterdir()] == ["iter-000001"]
    verify_checkpoint(checkpoints(segment)[0])
    assert json.loads((checkpoints(segment)[0] / "state.json").read_text())["trainer"]["iteration"] == 1


def test_a_full_disk_is_told_as_one_and_costs_no_earlier_checkpoint(tmp_path: Path) -> None:
    """A real limit on the size of a file stands for it: the write of weights stops in the middle."""
    segment = toy_segment(tmp_path / "run", {**make_toy(tmp_path), "checkpoints": {"every": 1, "keep_last": 1}})
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)

    def change(trainer: Any) -> None:
        save = trainer._save

        def fills_the_disk(reason: str) -> None:
            if trainer.state.iteration == 2:
                resource.setrlimit(resource.RLIMIT_FSIZE, (segment.journal.stat().st_size + 5000, unlimited[1]))
            try:
                save(reason)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)

        trainer._save = fills_the_disk

    assert run_segment(segment, token=0, attempt=1, change=change) == ExitCode.FAULT
    error = journal(segment, "end")[0].payload["error"]
    assert error["code"] == "checkpoint"
    assert "could not be written" in error["message"]
    assert "checkpoints.keep_last" in error["hint"]
    assert [path.name for path in segment.checkpoints.iterdir()] == ["iter-000001"]
    verify_checkpoint(checkpoints(segment)[0])


def test_slices_that_overlap_leave_a_gap_or_lack_an_end_are_named(tmp_path: Path) -> None:
    """Three slices of two elements: whole, with one twice and one missing, and without the last."""
    for number in range(3):
        save_file({"a": torch.tensor([2.0 * number, 2.0 * number + 1])}, tmp_path / f"{number}.safetensors")

    def read(*slices: tuple[int, int]) -> Any:
        parts = [{"file": f"{number}.safetensors", "start": start} for number, start in slices]
        return SavedTensors(tmp_path, {"a": {"shape": [3, 2], "slices": parts}})["a"]

    assert read((0, 0), (1, 2), (2, 4)).tolist() == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(CheckpointError, match="a has a slice at 1 where 2 belongs"):
        read((0, 0), (1, 1), (2, 4))
    with pytest.raises(CheckpointError, match="a has 4 of its 6 elements"):
        read((0, 0), (1, 2))
