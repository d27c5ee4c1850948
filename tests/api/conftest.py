"""The real application on a real database, a caller for every role, and folders that a spec can name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from fastapi import FastAPI
from sqlalchemy import update
from sqlalchemy.orm import Session, sessionmaker
from starlette.testclient import TestClient

from api.main import create_app
from api.settings import ApiSettings
from ppo_core.spec import RewardHosts
from store import keys
from store.ids import new_id
from store.models import Checkpoint, Run, Segment
from store.runs import create_run
from store.webhook_hosts import WebhookHosts
from tests.api.trained_run import Trained

ADDRESS = "http://127.0.0.1"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a reward model and prompts, as far as a submit looks at them."""
    folder = tmp_path_factory.mktemp("root")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    for name in ("policy", "reward"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        (folder / name / "model.safetensors").write_bytes(b"")
    rows = "".join(json.dumps({"prompt": f"film number {number} is"}) + "\n" for number in range(80))
    (folder / "train.jsonl").write_text(rows)
    (folder / "held_out.jsonl").write_text(rows)
    return folder


@pytest.fixture(scope="module")
def settings(module_url: str, root: Path, tmp_path_factory: pytest.TempPathFactory) -> ApiSettings:
    return ApiSettings(
        DATABASE_URL=module_url,
        REDIS_URL=None,
        data_dir=tmp_path_factory.mktemp("data"),
        roots=(root,),
        reward_hosts=RewardHosts.parse("rewards.example"),
        webhook_hosts=WebhookHosts.parse("hooks.example,127.0.0.1:9000"),
        web_build=tmp_path_factory.mktemp("no-web"),
    )


@pytest.fixture(scope="module")
def app(settings: ApiSettings) -> FastAPI:
    return create_app(settings)


@pytest.fixture(scope="module")
def running(app: FastAPI) -> Iterator[TestClient]:
    """The application, started; without a credential."""
    with TestClient(app, base_url=ADDRESS, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="module")
def keys_by_role(sessions: sessionmaker[Session]) -> dict[str, str]:
    with sessions.begin() as session:
        return {role: keys.create_key(session, f"the {role}", role)[1] for role in ("viewer", "operator", "admin")}


@pytest.fixture(scope="module")
def as_role(running: TestClient, keys_by_role: dict[str, str]) -> Callable[[str], TestClient]:
    def client(role: str) -> TestClient:
        return TestClient(
            running.app,
            base_url=ADDRESS,
            raise_server_exceptions=False,
            headers={"Authorization": f"Bearer {keys_by_role[role]}"},
        )

    return client


@pytest.fixture(scope="module")
def operator(as_role: Callable[[str], TestClient]) -> TestClient:
    return as_role("operator")


@pytest.fixture(scope="module")
def viewer(as_role: Callable[[str], TestClient]) -> TestClient:
    return as_role("viewer")


@pytest.fixture(scope="module")
def admin(as_role: Callable[[str], TestClient]) -> TestClient:
    return as_role("admin")


@pytest.fixture
def spec() -> dict[str, Any]:
    """A good spec; its paths are relative to the root."""
    return {
        "name": "reviews",
        "policy": {"model": "policy"},
        "data": {"prompts": "train.jsonl", "held_out": "held_out.jsonl"},
        "reward": {"sources": [{"kind": "sequence_classifier", "model": "reward"}]},
    }


@pytest.fixture
def submit(operator: TestClient, spec: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """Submit the good spec, changed by `fields`, and return the run."""

    def post(**fields: Any) -> dict[str, Any]:
        headers = {"Idempotency-Key": uuid4().hex}
        answer = operator.post("/v1/runs", json={"spec": {**spec, **fields}}, headers=headers)
        assert answer.status_code == 201, answer.text
        run: dict[str, Any] = answer.json()
        return run

    return post


@pytest.fixture
def make_run(sessions: sessionmaker[Session]) -> Callable[..., str]:
    """Store a run without going through the service; returns its id."""

    def make(**fields: Any) -> str:
        run_id = new_id("r")
        with sessions.begin() as session:
            values = {"name": "test", "spec": {}, "num_iterations": 10, "priority": 0, "gpus": 0, "created_by": "ada"}
            create_run(session, run_id=run_id, **{**values, **fields})
        return run_id

    return make


@pytest.fixture
def trained(
    operator: TestClient,
    submit: Callable[..., dict[str, Any]],
    sessions: sessionmaker[Session],
    settings: ApiSettings,
) -> Trained:
    """A submitted run of 100 iterations that has come to iteration 30."""
    run_id = submit(iterations=100)["id"]
    trained = Trained(operator, sessions, settings.data_dir / "runs" / run_id, run_id)
    trained.reach(30, "starting", "running")
    return trained


@pytest.fixture
def back_to(sessions: sessionmaker[Session]) -> Callable[[str, int], None]:
    """Have a stored run go back to an iteration, from which its segment 2 goes on."""

    def go(run_id: str, iteration: int) -> None:
        checkpoint = Checkpoint(
            id=f"k-{run_id}", run_id=run_id, segment=1, iteration=iteration, path="p", bytes=1, manifest_sha256="0",
            reason="schedule", lease_token=1,
        )  # fmt: skip
        with sessions.begin() as session:
            session.add(checkpoint)
            session.flush()
            session.add(
                Segment(
                    run_id=run_id, number=2, kind="rollback", spec={}, start_iteration=iteration,
                    start_checkpoint=checkpoint.id,
                )
            )  # fmt: skip
            session.flush()
            session.execute(update(Run).where(Run.id == run_id).values(active_segment=2))

    return go


@pytest.fixture
def num_runs(sessions: sessionmaker[Session]) -> Callable[[], int]:
    def count() -> int:
        with sessions() as session:
            return session.query(Run).count()

    return count


@contextmanager
def browser(app: FastAPI, cookie: str) -> Iterator[TestClient]:
    """A client that has only a session cookie."""
    yield TestClient(app, base_url=ADDRESS, raise_server_exceptions=False, headers={"Cookie": f"ppo_session={cookie}"})
