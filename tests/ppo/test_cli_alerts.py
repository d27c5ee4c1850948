"""Alerts and webhooks from the command line, against the real service; what `--fail-on` makes of an alert."""

from __future__ import annotations

import json
import shlex
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from sqlalchemy.orm import Session, sessionmaker
from typer.testing import CliRunner

from api.settings import ApiSettings
from ppo.cli import app
from ppo.client import Client
from ppo.exits import Exit
from ppo.fail_on import code_with
from ppo.run_view import OpenAlerts
from ppo_core.spec.loading import apply_overrides
from store import keys
from store.alerts import event_fields, take_news
from store.events import append_event
from store.ids import new_id
from store.models import Checkpoint, Run
from store.runs import create_run, transition
from store.webhook_hosts import WebhookHosts
from tests.alert_news import news
from tests.api.live_server import in_thread
from tests.api.test_gate_routes import gate


@pytest.fixture(scope="module", autouse=True)
def client(
    module_url: str, sessions: sessionmaker[Session], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    with sessions.begin() as session:
        key = keys.create_key(session, "ada", "admin")[1]
    settings = ApiSettings(
        DATABASE_URL=module_url,
        REDIS_URL=None,
        data_dir=tmp_path_factory.mktemp("data"),
        webhook_hosts=WebhookHosts.parse("hooks.example"),
    )
    with in_thread(settings) as (url, _), Client(url, key) as client, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PPO_URL", url)
        patch.setenv("PPO_KEY", key)
        yield client


@pytest.fixture
def run_id(sessions: sessionmaker[Session]) -> str:
    """A run that trains."""
    made = new_id("r")
    with sessions.begin() as session:
        create_run(
            session, run_id=made, name=made, spec={}, num_iterations=20, priority=0, gpus=0, created_by="ada"
        )  # fmt: skip
        for state in ("starting", "running"):
            transition(session, made, state)
    return made


def raise_alert(sessions: sessionmaker[Session], run_id: str, **fields: Any) -> str:
    with sessions.begin() as session:
        payload = news(**fields)
        alert = take_news(session, session.get_one(Run, run_id), 1, 8, datetime.now(UTC), payload)
        append_event(session, run_id, "alert", {**event_fields(alert), "status": payload["status"]}, segment=1)
        return alert.id


def test_gates_and_checks_are_listed(sessions: sessionmaker[Session], run_id: str) -> None:
    assert json.loads(ppo("gates", run_id, "--json").output) == []
    assert (ppo("gates", run_id).output, ppo("preflight", run_id).output) == ("", "")
    checks = [{"check": "eos", "status": "warning", "detail": "EOS is rare", "remedy": "raise it"}]
    with sessions.begin() as session:
        append_event(session, run_id, "gate", gate(), segment=1, iteration=50)
        append_event(session, run_id, "gate", gate(tripped=True, rate=None), segment=1, iteration=100)
        append_event(session, run_id, "preflight", {"findings": checks, "numbers": {}}, segment=1, iteration=0)
    first, second = (line.split("\t") for line in ppo("gates", run_id).output.splitlines())
    assert first == [
        "1:50", "passed", "0.5781", "0.4915", "0.6602", "0.5781", "0.4915", "0.6602", "0.5", "0.1", "",
    ]  # fmt: skip
    assert second[:3] == ["1:100", "tripped", "–"]
    assert [one["tripped"] for one in json.loads(ppo("gates", run_id, "--json").output)] == [False, True]
    assert ppo("preflight", run_id).output == "eos\twarning\tEOS is rare\traise it\n"


def end(sessions: sessionmaker[Session], run_id: str, state: str = "succeeded") -> None:
    with sessions.begin() as session:
        transition(session, run_id, state)


def ppo(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def test_alerts_are_listed_shown_acknowledged_and_snoozed(sessions: sessionmaker[Session], run_id: str) -> None:
    suggestion = {"checkpoint": None, "changes": {"kl.coef": 0.1}, "reason": "KL ran away"}
    first = raise_alert(sessions, run_id, suggestion=suggestion)
    other = raise_alert(sessions, run_id, rule="band:other", severity="critical")
    raise_alert(sessions, run_id, rule="band:other", severity="critical", status="cleared")
    assert [line.split("\t")[0] for line in ppo("alerts", run_id).output.splitlines()] == [other, first]
    assert [one["id"] for one in json.loads(ppo("alerts", run_id, "--open", "--json").output)] == [first]
    assert first in ppo("alerts").output
    page = ppo("alerts", "show", first).output
    assert all(word in page for word in ("Raise kl.coef.", "12.4 nats; it was 4.1", "since 6"))
    assert "acknowledged by ada" in ppo("alerts", "ack", first).output
    assert "snoozed until" in ppo("alerts", "snooze", first, "--for", "2h").output
    assert "snoozed until" not in ppo("alerts", "snooze", first, "--for", "0").output
    wrong = ppo("alerts", "snooze", first, "--for", "soon")
    assert (wrong.exit_code, "30m" in wrong.output) == (Exit.USAGE, True)
    assert ppo("alerts", "ack", "a-none").exit_code == Exit.USAGE
    assert "[1 alert]" in ppo("get", run_id).output


def test_the_way_back_is_a_line_that_can_be_pasted(sessions: sessionmaker[Session], run_id: str) -> None:
    with sessions.begin() as session:
        saved = Checkpoint(
            id=new_id("k"), run_id=run_id, segment=1, iteration=5, path="segment-0001/checkpoints/iter-000005",
            manifest_sha256="0", reason="schedule", bytes=1, lease_token=1,
        )  # fmt: skip
        session.add(saved)
    changes = {"update.value_clip_range": None, "reward.length_baseline": "linear", "update.value_learning_rate": 3e-05}
    signs = [{"metric": "value/mean", "then": 1.0, "now": 2.0, "text": "its mean value is far from the returns"}]
    alert = raise_alert(
        sessions, run_id, rule="story:critic_not_learning", evidence=signs, detail="Its mean value is far off.",
        suggestion={"checkpoint": "1:5", "changes": changes, "reason": "it learns nothing"},
    )  # fmt: skip
    page = ppo("alerts", "show", alert).output
    assert page.count("mean value") == 1
    line = shlex.split(page.partition("go back")[2])
    assert line[:4] == ["ppo", "rollback", run_id, "1:5"]
    assert apply_overrides({}, line[5::2]) == {
        "update": {"value_clip_range": None, "value_learning_rate": 3e-05}, "reward": {"length_baseline": "linear"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("severity", "wanted", "code"),
    [
        ("critical", "alert:critical", Exit.TRIPPED),
        ("warning", "alert:critical", Exit.SUCCEEDED),
        ("warning", "alert:warning", Exit.TRIPPED),
        ("critical", "alert:warning", Exit.TRIPPED),
    ],
)
def test_an_alert_of_a_run_that_ended_well_still_fails_the_job(
    severity: str, wanted: str, code: Exit, sessions: sessionmaker[Session], run_id: str
) -> None:
    raise_alert(sessions, run_id, severity=severity)
    raise_alert(sessions, run_id, severity=severity, status="cleared")
    end(sessions, run_id)
    assert ppo("wait", run_id, "--fail-on", wanted).exit_code == code


def test_waiting_ends_as_soon_as_there_is_one_and_the_run_goes_on(
    sessions: sessionmaker[Session], run_id: str, client: Client
) -> None:
    found: list[Result] = []
    words = ("wait", run_id, "--fail-on", "alert:critical", "--json")
    waiting = threading.Thread(target=lambda: found.append(ppo(*words)))
    waiting.start()
    time.sleep(0.3)
    raise_alert(sessions, run_id, rule="band:calm")
    time.sleep(0.3)
    assert waiting.is_alive()
    alert = raise_alert(sessions, run_id, severity="critical")
    waiting.join(60)
    assert found[0].exit_code == Exit.TRIPPED
    assert [one["id"] for one in json.loads(found[0].stdout)["failed_on"]] == [alert]
    assert client.run(run_id)["state"] == "running"
    end(sessions, run_id, "failed")
    assert ppo("wait", run_id, "--fail-on", "alert:critical").exit_code == Exit.FAILED


def test_what_to_fail_on_is_a_known_word_and_somebody_waits(spec_file: Path) -> None:
    assert ppo("wait", "r-none", "--fail-on", "alert:loud").exit_code == Exit.USAGE
    assert ppo("submit", str(spec_file), "--fail-on", "alert:warning").exit_code == Exit.USAGE


def test_a_failed_run_says_so_itself() -> None:
    alert: Any = {"severity": "critical"}
    assert [code_with([alert], code) for code in (Exit.SUCCEEDED, Exit.STOPPED, Exit.FAILED, Exit.TIMED_OUT)] == [
        Exit.TRIPPED, Exit.TRIPPED, Exit.FAILED, Exit.TIMED_OUT,
    ]  # fmt: skip


def test_the_live_view_holds_the_alerts_that_are_open() -> None:
    view = OpenAlerts()
    early, late = news(rule="band:early", raised=5, title="early"), news(rule="band:late", raised=12, title="late")
    for payload in (early, late):
        view.event("alert", payload)
    assert view.lines == ["▲ warning: early", "▲ warning: late"]
    view.event("alert", {**early, "status": "acknowledged"})
    view.event("segment", {"start_iteration": 10})
    assert view.lines == ["▲ warning: early"]
    view.event("alert", {**early, "status": "cleared"})
    assert view.lines == []


def test_a_webhook_is_made_switched_and_removed() -> None:
    made = ppo("webhooks", "add", "chat", "https://hooks.example/in", "--event", "alert.raised")
    assert "whsec_" in made.output
    hook = json.loads(ppo("webhooks", "--json").output)[0]["id"]
    assert "pending" in ppo("webhooks", "test", hook).output
    (delivery,) = json.loads(ppo("webhooks", "deliveries", hook, "--json").output)
    rotated = ppo("webhooks", "rotate", hook, "--overlap", "2h").output
    assert "shown this once: whsec_" in rotated
    assert "the old one signs beside it until 20" in rotated
    assert "the old one signs no more" in ppo("webhooks", "rotate", hook, "--overlap", "0").output
    assert "\toff" in ppo("webhooks", "off", hook).output
    assert "dead" in ppo("webhooks", "deliveries", hook).output
    assert "\ton\t" in ppo("webhooks", "on", hook).output
    assert "pending after 0 attempts" in ppo("webhooks", "redeliver", hook, delivery["id"]).output
    refused = ppo("webhooks", "add", "chat", "https://elsewhere.example/")
    assert (refused.exit_code, "PPO_WEBHOOK_HOSTS" in refused.output) == (Exit.USAGE, True)
    assert ppo("webhooks", "rm", hook).exit_code == 0
    assert json.loads(ppo("webhooks", "--json").output) == []


def test_alert_rules_are_shown_as_what_set_takes(client: Client, tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text("alerts:\n  on_critical: pause\n  bands: {kl/ref_token: null}\n")
    made = ppo("alerts", "rules", "set", str(file))
    assert made.exit_code == 0, made.output
    shown = ppo("alerts", "rules")
    assert shown.output == made.output
    assert shown.output.startswith(f"# version {client.alert_rules.get()['version']}, changed by ada at ")
    file.write_text(shown.output)
    assert json.loads(ppo("alerts", "rules", "set", str(file), "--json").output) == client.alert_rules.get()
    assert client.alert_rules.put({})["alerts"] == {}


def test_alert_rules_of_another_version_or_with_faults_are_refused(client: Client, tmp_path: Path) -> None:
    before = client.alert_rules.get()
    file = tmp_path / "rules.yaml"
    file.write_text("alerts: {on_critical: explode}")
    refused = ppo("alerts", "rules", "set", str(file))
    assert refused.exit_code == Exit.USAGE
    assert "/alerts/on_critical" in refused.stderr
    file.write_text("alerts: {on_critical: pause}")
    stale = ppo("alerts", "rules", "set", str(file), "--version", str(before["version"] + 1))
    assert stale.exit_code not in (0, None)
    assert "If-Match" in stale.stderr
    file.write_text("on_critical: pause")
    assert ppo("alerts", "rules", "set", str(file)).exit_code == Exit.USAGE
    assert client.alert_rules.get() == before
