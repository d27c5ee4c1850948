"""Submitting: what is accepted is queued once, what has faults is refused with every fault and stored nowhere."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml
from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker
from starlette.testclient import TestClient

from api.main import create_app
from api.settings import ApiSettings
from store.hint import HINT_QUEUE, HINT_TASK
from store.models import AuditEntry, RunEvent, Segment, Worker
from tests.api.conftest import ADDRESS


def post(client: TestClient, body: Any, key: str | None = None, **params: Any) -> Any:
    return client.post("/v1/runs", json=body, headers={"Idempotency-Key": key or uuid4().hex}, params=params)


def test_a_good_spec_becomes_a_queued_run(
    operator: TestClient, spec: dict[str, Any], root: Path, sessions: sessionmaker[Session]
) -> None:
    answer = post(operator, {"spec": spec})
    assert answer.status_code == 201, answer.text
    run = answer.json()
    assert answer.headers["location"] == f"/v1/runs/{run['id']}"
    assert run["state"] == "queued"
    assert run["created_by"] == "the operator"
    assert run["waiting_reason"] == "No worker is connected."
    assert not run["has_judge"]
    detail = operator.get(answer.headers["location"]).json()
    assert detail["spec"]["policy"]["model"] == str(root / "policy")
    assert detail["spec"]["update"]["clip_range"] == 0.2  # defaults included
    assert yaml.safe_load(detail["spec_yaml"]) == detail["spec"]
    assert detail["spec_yaml"].startswith("name: reviews\nseed: 1\niterations:")
    with sessions() as session:
        assert session.get_one(Segment, (run["id"], 1)).spec == detail["spec"]
        assert session.scalars(select(RunEvent.type).where(RunEvent.run_id == run["id"])).all() == ["state"]
        entry = session.scalars(select(AuditEntry).where(AuditEntry.target == run["id"])).one()
        assert (entry.actor, entry.action) == ("the operator", "run.submit")


def test_yaml_text_is_accepted_too(operator: TestClient, spec: dict[str, Any]) -> None:
    text = "# a comment\n" + yaml.safe_dump({**spec, "update": {"learning_rate": "LR"}}).replace("LR", "1e-4")
    answer = post(operator, {"spec_yaml": text})
    assert answer.status_code == 201, answer.text
    assert operator.get(answer.headers["location"]).json()["spec"]["update"]["learning_rate"] == 1e-4


def changed(spec: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(spec))
    *groups, last = path.split(".")
    node = copy
    for group in groups:
        node = node.setdefault(group, {})
    node[last] = value
    return copy


FAULTS = [
    ("update.learning_rte", 1e-4, "/update/learning_rte", "learning_rate"),
    ("learning_rate", 1e-4, "/learning_rate", "update"),
    ("iterations", "many", "/iterations", "integer"),
    ("iterations", True, "/iterations", "integer"),
    ("iterations", 1.5, "/iterations", "integer"),
    ("iterations", 0, "/iterations", "greater"),
    ("kl.coef", float("nan"), "/kl/coef", ""),
    ("kl.coef", float("inf"), "/kl/coef", ""),
    ("policy.model", "no-such-model", "/policy/model", "does not exist"),
    ("policy.model", "/etc", "/policy/model", "outside"),
    ("policy.model", "../../../../../../../../etc", "/policy/model", "outside"),
    ("data.prompts", "missing.jsonl", "/data/prompts", "does not exist"),
    ("data.prompts", "policy", "/data/prompts", "it is a folder without state.json"),
    ("data.max_prompt_tokens", 5000, "/rollout/max_new_tokens", "context"),
    ("rollout.batch_size", 100, "/data/prompts", "fewer"),
    ("update.minibatches", 100, "/update/minibatches", "minibatch"),
    ("reward.sources", [], "/reward/sources", ""),
    ("reward.sources", [{"kind": "python", "name": "nobody.knows"}], "/reward/sources/0/name", "registered"),
    (
        "reward.sources",
        [{"kind": "http", "url": "https://elsewhere.example/"}],
        "/reward/sources/0/url",
        "add it to PPO_REWARD_HOSTS",
    ),
    ("rollout.vllm.servers", ["http://127.0.0.1:5432"], "/rollout/vllm/servers/0", "add it to PPO_ENGINE_HOSTS"),
    ("reward.sources", [{"kind": "http", "url": "http://127.0.0.1:5432/"}], "/reward/sources/0/url", "not allowed"),
    ("reward.sources", [{"kind": "http", "url": "https://a:b@rewards.example/"}], "/reward/sources/0/url", "password"),
    ("name", "nul\x00", "/name", "NUL"),
    ("rollout.stop_strings", ["\x00"], "/rollout/stop_strings/0", "NUL"),
    ("policy", {}, "/policy/model", "required"),
]


@pytest.mark.parametrize(("path", "value", "pointer", "words"), FAULTS, ids=[f"{f[0]}={f[1]!r:.20}" for f in FAULTS])
def test_a_fault_is_named_by_its_field_and_nothing_is_stored(
    path: str,
    value: Any,
    pointer: str,
    words: str,
    operator: TestClient,
    spec: dict[str, Any],
    num_runs: Callable[[], int],
) -> None:
    before = num_runs()
    key = uuid4().hex
    for params in ({}, {"dry_run": "true"}):
        text = json.dumps({"spec": changed(spec, path, value)})
        headers = {"Idempotency-Key": key, "Content-Type": "application/json"}
        answer = operator.post("/v1/runs", content=text, headers=headers, params=params)
        assert answer.status_code == 422, answer.text
        problem = answer.json()
        assert answer.headers["content-type"] == "application/problem+json"
        assert problem["code"] == "bad_spec"
        assert problem["status"] == 422
        mine = [error for error in problem["errors"] if error["pointer"] == pointer]
        assert mine, problem
        assert words in mine[0]["message"]
    assert num_runs() == before
    # The key is still free: it can carry the corrected spec.
    assert post(operator, {"spec": spec}, key).status_code == 201


def test_a_scorer_on_a_host_that_the_service_allows_is_accepted(operator: TestClient, spec: dict[str, Any]) -> None:
    source = {"kind": "http", "url": "https://rewards.example/score"}
    answer = post(operator, {"spec": changed(spec, "reward.sources", [source])}, dry_run="true")
    assert answer.status_code == 200, answer.text
    assert answer.json()["spec"]["reward"]["sources"][0]["url"] == source["url"]


def test_a_number_that_no_double_holds_is_refused(operator: TestClient, spec: dict[str, Any]) -> None:
    text = json.dumps({"spec": changed(spec, "kl.coef", 12345.5)}).replace("12345.5", "1e400")
    headers = {"Idempotency-Key": "big", "Content-Type": "application/json"}
    assert operator.post("/v1/runs", content=text, headers=headers).status_code == 422


def test_half_a_surrogate_pair_is_refused(operator: TestClient, spec: dict[str, Any], num_runs: Any) -> None:
    before = num_runs()
    for path, value in (("name", "a\ud800"), ("rollout.stop_strings", ["\udfff"]), ("policy.model", "\ud800")):
        text = json.dumps({"spec": changed(spec, path, value)})
        headers = {"Idempotency-Key": uuid4().hex, "Content-Type": "application/json"}
        answer = operator.post("/v1/runs", content=text, headers=headers)
        assert answer.status_code == 422, answer.text
    assert num_runs() == before


def test_malformed_yaml_is_refused_with_line_and_column(operator: TestClient, num_runs: Any) -> None:
    before = num_runs()
    answer = post(operator, {"spec_yaml": "name: x\n  policy: [1, 2\n"})
    assert answer.status_code == 422
    assert "line" in answer.json()["errors"][0]["message"]
    assert num_runs() == before


def test_all_faults_come_at_once(operator: TestClient, spec: dict[str, Any]) -> None:
    bad = changed(changed(spec, "iterations", 0), "kl.coeff", 1)
    pointers = {error["pointer"] for error in post(operator, {"spec": bad}).json()["errors"]}
    assert pointers == {"/iterations", "/kl/coeff"}


@pytest.mark.parametrize("body", [{}, {"spec": {}, "spec_yaml": ""}, {"spec": []}, {"spek": {}}, []])
def test_a_body_without_one_spec_is_refused(body: Any, operator: TestClient) -> None:
    answer = post(operator, body)
    assert answer.status_code == 422
    assert answer.json()["errors"]


def test_a_spec_longer_than_its_limit_is_refused(operator: TestClient, spec: dict[str, Any]) -> None:
    for body in ({"spec": {**spec, "name": "x" * 300_000}}, {"spec_yaml": "#" * 300_000}):
        assert post(operator, body).status_code == 422


def test_dry_run_says_what_it_would_do_and_queues_nothing(
    operator: TestClient, spec: dict[str, Any], root: Path, num_runs: Any
) -> None:
    before = num_runs()
    answer = operator.post("/v1/runs", params={"dry_run": "true"}, json={"spec": spec})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["spec"]["data"]["prompts"] == str(root / "train.jsonl")
    assert found["estimate"]["optimizer_steps"] == 100 * 2 * 4
    assert found["meaning"]
    assert isinstance(found["warnings"], list)
    said = [text for text in (*found["meaning"], *found["warnings"]) if "no judge" in text]
    assert said == ["no judge: nothing watches for reward hacking; set gate.judge and data.held_out"]
    assert num_runs() == before


# Idempotency


def test_without_an_idempotency_key_nothing_is_queued(
    operator: TestClient, spec: dict[str, Any], num_runs: Any
) -> None:
    before = num_runs()
    answer = operator.post("/v1/runs", json={"spec": spec})
    assert answer.status_code == 400
    assert answer.json()["code"] == "idempotency_key_missing"
    assert num_runs() == before


def test_twenty_simultaneous_repeats_make_one_run(operator: TestClient, spec: dict[str, Any], num_runs: Any) -> None:
    before = num_runs()
    key = uuid4().hex
    with ThreadPoolExecutor(20) as threads:
        answers = list(threads.map(lambda _: post(operator, {"spec": spec}, key), range(20)))
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert num_runs() == before + 1


def test_a_repeat_after_a_restart_finds_the_run(
    operator: TestClient, spec: dict[str, Any], settings: ApiSettings, keys_by_role: dict[str, str]
) -> None:
    key = uuid4().hex
    first = post(operator, {"spec": spec}, key).json()
    headers = {"Authorization": f"Bearer {keys_by_role['operator']}"}
    with TestClient(create_app(settings), base_url=ADDRESS, headers=headers) as again:
        assert post(again, {"spec": spec}, key).json()["id"] == first["id"]


def test_a_repeat_does_not_look_at_the_files_again(operator: TestClient, spec: dict[str, Any], root: Path) -> None:
    key = uuid4().hex
    prompts = root / "short-lived.jsonl"
    prompts.write_text((root / "train.jsonl").read_text())
    body = {"spec": changed(spec, "data.prompts", "short-lived.jsonl")}
    first = post(operator, body, key).json()
    prompts.unlink()
    assert post(operator, body, key).json()["id"] == first["id"]


def test_the_same_key_with_another_body_is_422(operator: TestClient, spec: dict[str, Any], num_runs: Any) -> None:
    key = uuid4().hex
    post(operator, {"spec": spec}, key)
    before = num_runs()
    answer = post(operator, {"spec": {**spec, "seed": 2}}, key)
    assert answer.status_code == 422
    assert answer.json()["code"] == "idempotency_key_reused"
    assert num_runs() == before


def test_the_same_key_of_another_caller_is_another_key(
    operator: TestClient, admin: TestClient, spec: dict[str, Any]
) -> None:
    key = uuid4().hex
    mine, theirs = post(operator, {"spec": spec}, key), post(admin, {"spec": {**spec, "seed": 3}}, key)
    assert theirs.status_code == 201
    assert mine.json()["id"] != theirs.json()["id"]


@pytest.mark.parametrize("key", ["", "x" * 256, "a b", "tab\t"])
def test_odd_idempotency_keys_are_refused(key: str, operator: TestClient, spec: dict[str, Any]) -> None:
    answer = operator.post("/v1/runs", json={"spec": spec}, headers={"Idempotency-Key": key})
    assert answer.status_code in (400, 422)


# The broker


@pytest.fixture
def silent_listener() -> Iterator[str]:
    """An address that takes connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}/0"


@pytest.fixture
def refused_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"redis://127.0.0.1:{probe.getsockname()[1]}/0"


@pytest.mark.parametrize("broker", ["silent_listener", "refused_port"])
def test_a_broker_that_is_away_slows_no_submit(
    broker: str,
    request: pytest.FixtureRequest,
    settings: ApiSettings,
    spec: dict[str, Any],
    keys_by_role: dict[str, str],
) -> None:
    away = settings.model_copy(update={"redis_url": request.getfixturevalue(broker)})
    headers = {"Authorization": f"Bearer {keys_by_role['operator']}"}
    with TestClient(create_app(away), base_url=ADDRESS, headers=headers) as client:
        slowest_health = 0.0
        done = threading.Event()

        def poll() -> None:
            nonlocal slowest_health
            while not done.is_set():
                begun = time.monotonic()
                assert client.get("/healthz").status_code == 200
                slowest_health = max(slowest_health, time.monotonic() - begun)
                time.sleep(0.05)

        poller = threading.Thread(target=poll)
        poller.start()
        begun = time.monotonic()
        with ThreadPoolExecutor(10) as threads:
            answers = list(threads.map(lambda _: post(client, {"spec": spec}), range(10)))
        took_s = time.monotonic() - begun
        done.set()
        poller.join()
        assert {answer.status_code for answer in answers} == {201}
        assert took_s < 5
        assert slowest_health < 1
        ready = client.get("/readyz")
        assert ready.status_code == 200
        assert ready.json()["checks"]["database"] == "ok"
        assert ready.json()["checks"]["broker"] in ("slow", "unreachable")
        assert client.get("/v1/runs").status_code == 200


def test_a_submit_leaves_a_hint_with_the_broker(
    settings: ApiSettings, spec: dict[str, Any], keys_by_role: dict[str, str], redis_url: str
) -> None:
    import redis

    present = settings.model_copy(update={"redis_url": redis_url})
    headers = {"Authorization": f"Bearer {keys_by_role['operator']}"}
    store = redis.Redis(unix_socket_path=redis_url.removeprefix("redis+socket://"))
    with TestClient(create_app(present), base_url=ADDRESS, headers=headers) as client:
        assert client.get("/readyz").json() == {"ready": True, "checks": {"database": "ok", "broker": "ok"}}
        assert post(client, {"spec": spec}).status_code == 201
        deadline = time.monotonic() + 5
        while not (waiting := store.lrange(HINT_QUEUE, 0, -1)):
            assert time.monotonic() < deadline, "no hint within 5 s"
            time.sleep(0.05)
    message = json.loads(waiting[0])
    assert message["headers"]["task"] == HINT_TASK
    assert message["content-type"] == "application/json"


def test_a_dry_run_warns_of_more_gpus_than_any_worker_has(
    operator: TestClient, spec: dict[str, Any], sessions: sessionmaker[Session]
) -> None:
    def warnings(gpus: int) -> list[str]:
        answer = post(operator, {"spec": {**spec, "resources": {"gpus": gpus}}}, dry_run=True)
        return [warning for warning in answer.json()["warnings"] if "resources.gpus" in warning]

    assert warnings(1) == []  # nobody knows yet what machines there will be
    with sessions.begin() as session:
        session.add(Worker(id="w", state="gone", host="h", pid=1, cpu_slots=1, gpus=0, version="0", data_token="t"))
    try:
        assert warnings(0) == []
        assert warnings(1)[0].startswith("resources.gpus is 1, more than any worker that was ever connected has (0)")
    finally:
        with sessions.begin() as session:
            session.delete(session.get_one(Worker, "w"))
