"""The specs in examples/specs: valid, fit for the machines they name, and described in README as the command does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ppo.cli import app
from ppo.spec_file import read_spec_file
from ppo_core.estimate import Estimate, estimate
from ppo_core.memory_words import gpu_bytes
from ppo_core.spec import parse_spec

ROOT = Path(__file__).parents[2]
COMMAND = "ppo train examples/specs/seven_billion.yaml --dry-run"
# The sizes that the model's own config.json gives.
QWEN_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
PARAMETERS = 7_615_616_512


@pytest.fixture
def seven_billion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The spec in a folder where all that it names lies, of the model nothing but its sizes."""
    monkeypatch.setenv("PPO_REWARD_HOSTS", "rewards.example,judge.example")
    model = tmp_path / "models" / "Qwen2.5-7B"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(QWEN_7B))
    (model / "model.safetensors").write_bytes(b"")
    (tmp_path / "prompts").mkdir()
    for name in ("train", "held_out"):
        rows = "".join(json.dumps({"prompt": f"prompt {row}"}) + "\n" for row in range(512))
        (tmp_path / "prompts" / f"{name}.jsonl").write_text(rows)
    return Path(shutil.copy(ROOT / "examples" / "specs" / "seven_billion.yaml", tmp_path))


def estimate_of(spec: Path, *overrides: str) -> Estimate:
    return estimate(parse_spec(read_spec_file(spec, overrides)))


def test_states_are_sixteen_bytes_a_trained_parameter_over_the_ranks_and_two_a_frozen_one(seven_billion: Path) -> None:
    found = estimate_of(seven_billion)
    assert found.policy_parameters == PARAMETERS
    assert found.memory is not None
    trained = PARAMETERS + 3584 + 1  # and a value head
    assert found.memory.states_bytes == pytest.approx(16 * trained / 8 + 2 * PARAMETERS, abs=64)


def test_trainer_and_engine_fit_a_gpu_of_80_gb(seven_billion: Path) -> None:
    spec, found = parse_spec(read_spec_file(seven_billion)), estimate_of(seven_billion)
    assert found.memory is not None
    share = spec.rollout.vllm.gpu_memory_utilization * 80e9
    assert found.memory.engines_bytes < share
    assert gpu_bytes(spec, found.memory, 80 * 10**9) < 0.9 * 80e9  # CUDA, NCCL and fragments want some, too
    assert not any("GPU" in warning for warning in found.warnings)


@pytest.mark.parametrize(
    "overrides",
    [
        ("training.zero_stage=1",),
        ("training.zero_stage=2", "policy.value_head=separate"),
        ("training.ranks=1", "resources.gpus=1"),
    ],
)
def test_what_does_not_fit_is_warned_of(seven_billion: Path, overrides: tuple[str, ...]) -> None:
    assert any("more than the 74.5 GiB" in warning for warning in estimate_of(seven_billion, *overrides).warnings)


def test_readme_shows_what_the_command_prints(seven_billion: Path) -> None:
    done = CliRunner().invoke(app, ["train", str(seven_billion), "--dry-run"])
    assert done.exit_code == 0, done.output
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"$ {COMMAND}\n{done.stdout}```\n" in readme
