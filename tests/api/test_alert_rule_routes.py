"""The platform's alert rules over REST: changed by admins who saw them, filled into specs that leave them out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest
import yaml
from httpx2 import Response
from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker
from starlette.testclient import TestClient

from store.models import AuditEntry, Run

LENGTH = "response/length_mean"
KL = "policy/approx_kl"
PATH = "/v1/alert-rules"


def put(client: TestClient, alerts: Any, if_match: str = "*") -> Response:
    return client.put(PATH, json={"alerts": alerts}, headers={"If-Match": if_match})


@pytest.fixture
def set_rules(admin: TestClient) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Rules for one test: those of another would be filled into its runs, too."""

    def change(alerts: dict[str, Any]) -> None:
        answer = put(admin, alerts)
        assert answer.status_code == 200, answer.text

    yield change
    change({})


def dry_run(client: TestClient, spec: dict[str, Any]) -> dict[str, Any]:
    answer = client.post("/v1/runs?dry_run=true", json={"spec": spec})
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def test_they_are_read_by_all_and_changed_by_admins(
    admin: TestClient, operator: TestClient, viewer: TestClient, set_rules: Callable[[dict[str, Any]], None]
) -> None:
    set_rules({"on_critical": "pause"})
    answer = viewer.get(PATH)
    rules = answer.json()
    assert answer.headers["ETag"] == f'"{rules["version"]}"'
    assert (rules["alerts"], rules["changed_by"]) == ({"on_critical": "pause"}, "the admin")
    assert rules["changed_at"].endswith("Z")
    assert put(operator, {}).status_code == put(viewer, {}).status_code == 403


def test_a_change_names_the_version_that_was_seen(
    admin: TestClient, set_rules: Callable[[dict[str, Any]], None]
) -> None:
    set_rules({"on_warning": "note"})
    seen = admin.get(PATH).headers["ETag"]
    assert admin.put(PATH, json={"alerts": {}}).status_code == 428
    changed = put(admin, {"on_warning": "pause"}, seen)
    assert changed.status_code == 200
    assert changed.headers["ETag"] == f'"{changed.json()["version"]}"' != seen
    stale = put(admin, {"on_warning": "stop"}, seen)
    assert (stale.status_code, stale.json()["code"]) == (412, "if_match_stale")
    assert admin.get(PATH).json()["alerts"] == {"on_warning": "pause"}


def test_of_changes_at_once_one_wins(
    as_role: Callable[[str], TestClient], admin: TestClient, set_rules: Callable[[dict[str, Any]], None]
) -> None:
    set_rules({})
    seen = admin.get(PATH).headers["ETag"]
    with ThreadPoolExecutor(4) as pool:
        wishes = [{"baseline_iterations": 50 + number} for number in range(4)]
        statuses = list(pool.map(lambda wish: put(as_role("admin"), wish, seen).status_code, wishes))
    assert sorted(statuses) == [200, 412, 412, 412]
    assert admin.get(PATH).json()["version"] == int(seen.strip('"')) + 1


@pytest.mark.parametrize(
    ("alerts", "pointer", "words"),
    [
        ({"bands": {"response/length": None}}, "/alerts/bands/response~1length", "did you mean"),
        ({"bands": {KL: {"low": 2, "high": 1}}}, "/alerts/bands/policy~1approx_kl/high", "high is 1 but low is 2"),
        ({"on_red": "stop"}, "/alerts/on_red", "on_critical"),
        ({"on_story": None}, "/alerts/on_story", "None"),
        ({"bands": {KL: {"high": "2"}}}, "/alerts/bands/policy~1approx_kl/high", "'2'"),
        ({"bands\0": {}}, "/alerts/bands\0", "unknown field"),
    ],
)
def test_faults_are_named_and_nothing_changes(admin: TestClient, alerts: Any, pointer: str, words: str) -> None:
    before = admin.get(PATH).json()
    answer = put(admin, alerts)
    assert (answer.status_code, answer.json()["code"]) == (422, "bad_spec")
    assert answer.json()["detail"] == "The platform's alert rules have 1 fault."
    (fault,) = answer.json()["errors"]
    assert fault["pointer"] == pointer.replace("\0", "\u2400")
    assert words in fault["message"]
    assert admin.get(PATH).json() == before


@pytest.mark.parametrize("body", [{}, {"alerts": 5}, {"alerts": None}, {"alerts": {}, "bands": {}}, []])
def test_a_body_of_another_shape_is_refused(admin: TestClient, body: Any) -> None:
    assert admin.put(PATH, json=body, headers={"If-Match": "*"}).status_code == 422


def test_a_run_is_stored_with_the_rules_that_stood_when_it_was_submitted(
    set_rules: Callable[[dict[str, Any]], None],
    submit: Callable[..., dict[str, Any]],
    viewer: TestClient,
    sessions: sessionmaker[Session],
) -> None:
    set_rules({"on_critical": "pause", "bands": {LENGTH: {"high": 2.5}, KL: None}})
    run = submit(name="with rules", alerts={"bands": {KL: {"high": 0.3}}})
    set_rules({"on_critical": "stop"})
    for alerts in (viewer.get(f"/v1/runs/{run['id']}").json()["spec"]["alerts"], stored_alerts(sessions, run["id"])):
        assert (alerts["on_critical"], alerts["on_warning"]) == ("pause", "note")
        assert alerts["bands"][LENGTH]["high"] == 2.5
        assert alerts["bands"][KL]["high"] == 0.3
    with sessions() as session:
        entry = session.scalars(
            select(AuditEntry).where(AuditEntry.target == run["id"], AuditEntry.action == "run.submit")
        ).one()
    assert entry.detail == {"from_alert_rules": ["alerts.on_critical", f"alerts.bands.{LENGTH}"]}


def stored_alerts(sessions: sessionmaker[Session], run_id: str) -> Any:
    with sessions() as session:
        return session.get_one(Run, run_id).spec["alerts"]


def test_a_dry_run_says_what_came_from_the_rules(
    set_rules: Callable[[dict[str, Any]], None], viewer: TestClient, operator: TestClient, spec: dict[str, Any]
) -> None:
    assert dry_run(operator, spec)["from_alert_rules"] == []
    set_rules({"on_story": "stop", "bands": {LENGTH: {"high": 2.5}}})
    found = dry_run(operator, spec)
    assert found["from_alert_rules"] == ["alerts.on_story", f"alerts.bands.{LENGTH}"]
    assert found["spec"]["alerts"]["on_story"] == "stop"
    assert "on_story: stop" in found["spec_yaml"]
    own = dry_run(operator, {**spec, "alerts": {"on_story": "note", "bands": {LENGTH: None}}})
    assert own["from_alert_rules"] == []
    assert (own["spec"]["alerts"]["on_story"], own["spec"]["alerts"]["bands"]) == ("note", {LENGTH: None})


def test_a_spec_as_text_is_filled_alike(
    set_rules: Callable[[dict[str, Any]], None], operator: TestClient, spec: dict[str, Any]
) -> None:
    set_rules({"on_warning": "pause"})
    answer = operator.post("/v1/runs?dry_run=true", json={"spec_yaml": yaml.safe_dump(spec)})
    assert answer.json()["from_alert_rules"] == ["alerts.on_warning"]


def test_a_repeated_request_is_the_same_whatever_the_rules_became(
    set_rules: Callable[[dict[str, Any]], None], operator: TestClient, spec: dict[str, Any]
) -> None:
    set_rules({"on_warning": "pause"})
    headers = {"Idempotency-Key": uuid4().hex}
    first = operator.post("/v1/runs", json={"spec": spec}, headers=headers).json()
    set_rules({"on_warning": "stop"})
    again = operator.post("/v1/runs", json={"spec": spec}, headers=headers).json()
    assert again["id"] == first["id"]
    assert operator.get(f"/v1/runs/{first['id']}").json()["spec"]["alerts"]["on_warning"] == "pause"
