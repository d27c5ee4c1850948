"""A spec whose files exist without anything in them that torch could load, and the scripted trainer in place."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPTED = f"{sys.executable} {Path(__file__).parents[1] / 'worker' / 'scripted_trainer.py'}"

SPEC = """\
name: Tiny run/1
iterations: 6
policy: {model: model}
data: {prompts: prompts.jsonl}
rollout: {batch_size: 4, max_new_tokens: 8}
reward: {sources: [{kind: sequence_classifier, model: model}]}
checkpoints: {every: 1, keep_last: 2}
"""


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    """A good spec in a folder of its own, its paths relative."""
    folder = tmp_path / "spec"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 128, "num_labels": 1}))
    (folder / "model" / "model.safetensors").write_bytes(b"")
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"text {n}"}) + "\n" for n in range(8)))
    (folder / "spec.yaml").write_text(SPEC)
    return folder / "spec.yaml"


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`ppo train` starts the scripted trainer; call it to say what the trainer does."""

    def script(**knobs: object) -> None:
        monkeypatch.setenv("PPO_SCRIPTED", json.dumps({"iteration_s": 0.02, "checkpoint_every": 1, **knobs}))

    monkeypatch.setenv("PPO_TRAINER_COMMAND", SCRIPTED)
    script()
    return script
