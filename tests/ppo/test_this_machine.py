"""What a machine lacks for a run is said before the run starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ppo.this_machine import shortfalls
from ppo_core.estimate import Estimate, estimate
from ppo_core.spec import parse_spec

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


@pytest.fixture
def large() -> Estimate:
    raw = {
        "name": "large",
        "policy": {"model": "/nowhere/policy"},
        "data": {"prompts": "/nowhere/train.jsonl"},
        "reward": {"sources": [{"kind": "python", "name": "r"}]},
    }
    return estimate(parse_spec(raw), LLAMA_8B)


def meminfo(folder: Path, kib: int) -> Path:
    path = folder / "meminfo"
    path.write_text(f"MemTotal:       {2 * kib} kB\nMemAvailable:   {kib} kB\n")
    return path


def test_main_memory_that_is_not_there_is_said(large: Estimate, tmp_path: Path) -> None:
    said = [text for text in shortfalls(large, tmp_path, meminfo(tmp_path, 16 * 2**20)) if "main memory" in text]
    assert len(said) == 1
    assert "16.0 GiB are free" in said[0]


def test_enough_memory_and_disk_are_not_worth_a_word(large: Estimate, tmp_path: Path) -> None:
    small = replace(large, disk_bytes=10**6)
    assert list(shortfalls(small, tmp_path / "not" / "yet", meminfo(tmp_path, 2**30))) == []


def test_a_disk_that_is_too_small_is_said(large: Estimate, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    said = list(shortfalls(replace(large, disk_bytes=10**18), run_dir, meminfo(tmp_path, 2**30)))
    assert len(said) == 1
    assert f"are free in {run_dir}" in said[0]
    assert f"for {large.checkpoints_kept} checkpoints" in said[0]


def test_a_system_that_does_not_say_is_not_guessed_at(large: Estimate, tmp_path: Path) -> None:
    small = replace(large, disk_bytes=10**6)
    assert list(shortfalls(small, tmp_path, tmp_path / "none")) == []
