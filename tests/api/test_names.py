"""A run's name is a label: it decides neither what a run is nor where its files lie (T38, T42)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from starlette.testclient import TestClient

from api.settings import ApiSettings
from store.ids import new_id


def test_runs_of_one_name_that_come_at_once_are_runs_of_their_own(operator: TestClient, spec: dict[str, Any]) -> None:
    """mlflow and others name a folder by second or user; two jobs then share it."""

    def submit(seed: int) -> tuple[str, int]:
        body = {"spec": {**spec, "name": "twins", "seed": seed}}
        run_id = operator.post("/v1/runs", json=body, headers={"Idempotency-Key": new_id("k")}).json()["id"]
        return run_id, operator.get(f"/v1/runs/{run_id}").json()["spec"]["seed"]

    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(submit, range(20)))
    assert len({run_id for run_id, _ in made}) == 20
    assert [seed for _, seed in made] == list(range(20))


@pytest.mark.parametrize("name", ["../../x", "a/b", "C:\\x", ".", "..", "/etc/passwd", "~root", "$(touch x)"])
def test_a_name_that_looks_like_a_path_is_kept_and_names_no_file(
    name: str, submit: Callable[..., dict[str, Any]], operator: TestClient, settings: ApiSettings
) -> None:
    run = submit(name=name)
    assert run["name"] == name
    renamed = operator.patch(f"/v1/runs/{run['id']}", json={"name": f"{name}/.."}, headers={"If-Match": "*"})
    assert renamed.status_code == 200
    assert operator.get(f"/v1/runs/{run['id']}/logs").json()["size"] == 0
    assert not list(settings.data_dir.rglob("*passwd*")) + list(settings.data_dir.parent.glob("x"))
    assert run["id"].removeprefix("r-").isalnum(), "its folder is named by this alone"


def test_a_name_of_300_characters_is_refused_by_field(operator: TestClient, spec: dict[str, Any]) -> None:
    headers = {"Idempotency-Key": new_id("k")}
    answer = operator.post("/v1/runs", json={"spec": {**spec, "name": "x" * 300}}, headers=headers)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"] == "/name"
