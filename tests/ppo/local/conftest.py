"""What the tests of the stack share: a spec whose name says what the scripted trainer does, and the `ppo` command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

TRAINER = f"{sys.executable} {Path(__file__).parents[1] / 'scripted_by_name.py'}"


def wait_for(what: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def ppo(*arguments: object, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    return subprocess.run(
        [sys.executable, "-m", "ppo.cli", *map(str, arguments)], env={**os.environ, **env}, capture_output=True,
        text=True, check=False, timeout=90,
    )  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a spec has to name."""
    folder = tmp_path_factory.mktemp("inputs")
    for name in ("policy", "reward"):
        (folder / name).mkdir()
        config = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 32,
            "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64, "max_position_embeddings": 128,
        }  # fmt: skip
        (folder / name / "config.json").write_text(json.dumps(config))
        (folder / name / "model.safetensors").write_bytes(b"")
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"text {n}"}) + "\n" for n in range(8)))
    return folder


@pytest.fixture(scope="module")
def write_spec(inputs: Path) -> Callable[..., Path]:
    """Write a spec for so many iterations; the knobs tell the scripted trainer what to do."""

    def write(iterations: int = 5, **knobs: object) -> Path:
        path = inputs / "spec.yaml"
        spec = {
            "name": f"run {json.dumps({'iteration_s': 0.02, **knobs})}",
            "iterations": iterations,
            "policy": {"model": "policy"},
            "data": {"prompts": "prompts.jsonl"},
            "rollout": {"batch_size": 4, "max_new_tokens": 8},
            "reward": {"sources": [{"kind": "sequence_classifier", "model": "reward"}]},
        }
        path.write_text(json.dumps(spec))
        return path

    return write
