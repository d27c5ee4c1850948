"""`ppo train --dry-run`: what a spec means and needs, with no platform, and nothing made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ppo.cli import app
from ppo.exits import Exit

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
def large_spec(spec_file: Path) -> Path:
    """A spec whose policy has eight billion parameters, of which nothing but the sizes is there."""
    (spec_file.parent / "model" / "config.json").write_text(json.dumps({**LLAMA_8B, "num_labels": 1}))
    return spec_file


def dry_run(spec: Path, *arguments: str) -> str:
    done = CliRunner().invoke(app, ["train", str(spec), "--dry-run", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_memory_is_said_by_phase(large_spec: Path) -> None:
    said = dry_run(large_spec)
    assert "a policy of 8,030,261,248 parameters: the run needs about" in said
    for phase in ("loading", "rollout", "logprobs", "update", "saving"):
        assert f"{phase} " in said
    assert said.endswith("nothing was started\n")
    assert not (large_spec.parent / "runs").exists()


def test_a_model_that_does_not_fit_a_gpu_is_warned_of_with_remedies(large_spec: Path) -> None:
    said = dry_run(large_spec, "--set", "resources.gpus=1", "--set", "policy.value_head=separate")
    warning = next(line for line in said.splitlines() if "more than the 74.5 GiB of one of 80 GB" in line)
    assert "use a shared value head" in warning
    assert "would hold it" not in warning  # no single GPU holds policy and critic with their moments


def test_a_model_that_fits_a_gpu_is_not_warned_of(large_spec: Path) -> None:
    few = ("policy.lora.rank=16", "policy.dtype=bfloat16", "resources.gpus=1")
    said = dry_run(large_spec, *(part for each in few for part in ("--set", each)))
    assert "each GPU needs" not in said


def test_json_is_the_estimate(large_spec: Path) -> None:
    found = json.loads(dry_run(large_spec, "--json"))
    assert found["memory"]["peak_bytes"] > 16 * found["policy_parameters"]


def test_faults_come_first(spec_file: Path) -> None:
    done = CliRunner().invoke(app, ["train", str(spec_file), "--dry-run", "--set", "policy.model=nowhere"])
    assert done.exit_code == Exit.USAGE
