"""What may not become a checkpoint, what is not taken for one, and what stands in it."""

from __future__ import annotations

import json
import math
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ppo_core.checkpoints import SavedTensors
from ppo_core.errors import CheckpointError
from ppo_core.main import run_segment
from ppo_core.rundir import (
    MANIFEST,
    ExitCode,
    checkpoints,
    journalled_digest,
    verify_checkpoint,
    write_manifest,
)
from tests.ppo_core.tiny_models import tiny_model, tiny_tokenizer
from tests.ppo_core.toy_run import TOKENS, journal, make_toy, toy_segment


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


def test_a_write_that_stops_in_the_middle_is_told_and_costs_no_earlier_checkpoint(tmp_path: Path) -> None:
    """By a real limit on the size of a file; a disk without space is another matter (`test_disk_full.py`)."""
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
    assert "last good checkpoint is untouched" in error["hint"]
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


# What is not gone on from


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {**make_toy(tmp_path_factory.mktemp("toy")), "iterations": 1, "checkpoints": {"every": 1}}


@pytest.fixture(scope="module")
def saved(toy: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of iteration 1."""
    segment = toy_segment(tmp_path_factory.mktemp("run"), toy)
    assert run_segment(segment, token=0, attempt=1) == ExitCode.DONE
    return segment.checkpoint(1)


def refusal(run_dir: Path, spec: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """The error of a run that was to go on from a checkpoint; it neither started nor wrote one."""
    segment = toy_segment(run_dir, {**spec, "iterations": 2}, number=2, checkpoint=str(checkpoint))
    assert run_segment(segment, token=0, attempt=1) == ExitCode.FAULT
    assert not journal(segment, "started")
    assert list(segment.checkpoints.iterdir()) == []
    error: dict[str, Any] = journal(segment, "end")[0].payload["error"]
    assert error["code"] == "checkpoint"
    return error


def test_nothing_to_go_on_from_is_refused_with_the_path(toy: dict[str, Any], tmp_path: Path) -> None:
    """T40: a path that does not exist, and an empty folder. Neither starts from the policy of the spec."""
    (tmp_path / "iter-000001").mkdir()
    for number, path in enumerate((tmp_path / "nowhere" / "iter-000001", tmp_path / "iter-000001")):
        error = refusal(tmp_path / str(number), toy, path)
        assert f"{path / 'manifest.json'} cannot be read, so this is no whole checkpoint" in error["message"]


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"lora": {"rank": 2}}, "policy.lora is rank 2, alpha 32, but the checkpoint was written under null"),
        ({"value_head": "separate"}, "policy.value_head is separate, but the checkpoint was written under shared"),
        ({"dtype": "bfloat16"}, "policy.dtype is bfloat16, but the checkpoint was written under float32"),
    ],
)
def test_other_trained_parameters_are_refused(
    toy: dict[str, Any], saved: Path, tmp_path: Path, policy: dict[str, Any], words: str
) -> None:
    error = refusal(tmp_path, {**toy, "policy": {**toy["policy"], **policy}}, saved)
    assert words in error["message"]
    assert "start a new run" in error["hint"]


def test_a_model_of_another_size_is_refused(toy: dict[str, Any], saved: Path, tmp_path: Path) -> None:
    """T40: another run's checkpoint."""
    wider = tiny_model("llama", vocab_size=TOKENS, hidden_size=48)
    wider.save_pretrained(tmp_path / "wider")
    tiny_tokenizer().save_pretrained(tmp_path / "wider")
    error = refusal(tmp_path / "run", {**toy, "policy": {"model": str(tmp_path / "wider")}}, saved)
    assert "in the checkpoint, [" in error["message"]
    assert "has shape [" in error["message"]


def changed(saved: Path, run_dir: Path, name: str, value: Any) -> Path:
    """A copy of a checkpoint in which somebody changed `random`, hashes and all."""
    copy = run_dir / "copied" / saved.name
    shutil.copytree(saved, copy)
    document = json.loads((copy / "state.json").read_text())
    assert document["random"][name] != value
    document["random"][name] = value
    (copy / "state.json").write_text(json.dumps(document))
    (copy / MANIFEST).unlink()
    write_manifest(copy)
    return copy


def test_a_checkpoint_without_its_value_head_is_refused_by_name(
    toy: dict[str, Any], saved: Path, tmp_path: Path
) -> None:
    """T25: huggingface/trl#1650. It does not start with a new one."""
    copy = tmp_path / "copied" / saved.name
    shutil.copytree(saved, copy)
    index = json.loads((copy / "state" / "index.json").read_text())
    index["tensors"] = {name: entry for name, entry in index["tensors"].items() if "value_head" not in name}
    (copy / "state" / "index.json").write_text(json.dumps(index))
    (copy / MANIFEST).unlink()
    write_manifest(copy)
    assert "the checkpoint has no weights for value_head." in refusal(tmp_path, toy, copy)["message"]


def test_what_stands_for_random_states_is_written_and_compared(
    toy: dict[str, Any], saved: Path, tmp_path: Path
) -> None:
    document = json.loads((saved / "state.json").read_text())
    assert document["random"] == {"scheme": "streams", "seed": 1, "data_seed": 1, "next_iteration": 2}
    for number, (name, value) in enumerate({"scheme": "mt19937", "data_seed": 2, "next_iteration": 3}.items()):
        copy = changed(saved, tmp_path / str(number), name, value)
        error = refusal(tmp_path / str(number), toy, copy)
        assert f"random.{name} is {value!r}, {document['random'][name]!r} belongs to the rest" in error["message"]


def test_a_changed_manifest_is_found_by_the_journals_digest(toy: dict[str, Any], saved: Path, tmp_path: Path) -> None:
    """White space alone: every file is what the manifest says, and still nobody knows who wrote it."""
    run = tmp_path / "run"
    shutil.copytree(saved.parents[2], run)
    copy = run / "segment-0001" / "checkpoints" / saved.name
    verify_checkpoint(copy, journalled_digest(copy))
    (copy / MANIFEST).write_text((copy / MANIFEST).read_text() + "\n")
    error = refusal(run, toy, copy)
    assert f"{copy / MANIFEST} has SHA-256" in error["message"]
