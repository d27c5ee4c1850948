"""A spec whose files exist without anything in them that torch could load, and the scripted trainer in place."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy.orm import Session, sessionmaker

from api.settings import ApiSettings
from ppo.client import Client
from store import keys
from tests.api.live_server import in_thread

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


# A platform's service, and a client of it in PPO_URL and PPO_KEY


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that a spec can name, and the platform's data folder."""
    folder = tmp_path_factory.mktemp("platform")
    (folder / "policy").mkdir()
    (folder / "policy" / "config.json").write_text('{"max_position_embeddings": 128}')
    (folder / "policy" / "model.safetensors").write_bytes(b"")
    (folder / "train.jsonl").write_text('{"prompt": "the film"}\n' * 64)
    return folder


@pytest.fixture(scope="module")
def client(module_url: str, sessions: sessionmaker[Session], folder: Path) -> Iterator[Client]:
    with sessions.begin() as session:
        key = keys.create_key(session, "ci", "operator")[1]
    settings = ApiSettings(DATABASE_URL=module_url, REDIS_URL=None, data_dir=folder / "data", roots=(folder,))
    with in_thread(settings) as (url, _), Client(url, key) as client, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PPO_URL", url)
        patch.setenv("PPO_KEY", key)
        yield client
