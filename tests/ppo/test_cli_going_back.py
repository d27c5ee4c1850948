"""Going back from the command line and the client behind it, against the real service and checkpoints on disk."""

from __future__ import annotations

import json
import os
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from sqlalchemy.orm import Session, sessionmaker
from typer.testing import CliRunner

from ppo.cli import app
from ppo.client import Client, RefusedError, RequestError, WaitTimeoutError
from ppo.exits import Exit
from store.commands import carry_out_kill
from store.metrics_write import IterationMetrics, write_metrics
from store.models import Run
from store.rollback import confirm_target, go_back, open_rollback
from store.runs import transition
from tests.api.checkpoint_files import SavedRun

NOW = datetime(2026, 11, 1, tzinfo=UTC)


@pytest.fixture
def run(client: Client, folder: Path, sessions: sessionmaker[Session]) -> SavedRun:
    """Training, at iteration 40, with four checkpoints."""
    spec = {
        "name": "toy",
        "iterations": 50,
        "policy": {"model": "policy"},
        "data": {"prompts": "train.jsonl"},
        "reward": {"sources": [{"kind": "sequence_classifier", "model": "policy"}]},
    }
    run_id = client.submit(spec)["id"]
    with sessions.begin() as session:
        for state in ("starting", "running"):
            transition(session, run_id, state)
        rows = [IterationMetrics(iteration, NOW, {"kl/coef": 0.1}) for iteration in range(1, 41)]
        write_metrics(session, run_id, 1, rows, active=True)
        session.get_one(Run, run_id).iteration = 40
    run = SavedRun(sessions, folder / "data" / "runs" / run_id, run_id)
    for iteration in (10, 20, 30, 40):
        run.save(iteration, verified_at=NOW)
    return run


def carry_out(run: SavedRun) -> None:
    """What the worker does with an open roll back."""
    with run.sessions.begin() as session:
        asked = open_rollback(session, run.run_id)
        assert asked is not None
        confirm_target(session, asked)
        transition(session, run.run_id, "stopping")
        go_back(session, run.run_id, asked)


def state(run: SavedRun, *states: str) -> None:
    with run.sessions.begin() as session:
        for one in states:
            transition(session, run.run_id, one)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def answer(*arguments: str) -> Any:
    done = invoke(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_roll_back_names_its_checkpoint_by_iteration_and_its_settings_by_name(client: Client, run: SavedRun) -> None:
    done = answer("rollback", run.run_id, "20", "--set", "kl.coef=0.2", "--set", "data.seed=5", "--reason", "KL")
    assert (done["kind"], done["status"]) == ("rollback", "pending")
    carry_out(run)
    _, second = client.segments(run.run_id)
    assert (second["kind"], second["reason"], second["created_by"]) == ("rollback", "KL", "ci")
    changes = {change["path"]: change["after"] for change in second["changes"]}
    assert changes == {"kl.coef": 0.2, "data.seed": 5}


def test_waiting_ends_with_the_outcome(client: Client, run: SavedRun) -> None:
    command = client.rollback(run.run_id, client.checkpoints(run.run_id)[0]["id"])
    with pytest.raises(WaitTimeoutError, match="is pending after 0"):
        client.wait_command(run.run_id, command["id"], timeout_s=0)
    carry_out(run)
    done = client.wait_command(run.run_id, command["id"])
    assert (done["status"], done["outcome"]) == ("done", {"segment": 2, "iteration": 10})


def test_wait_takes_no_longer_than_asked(run: SavedRun) -> None:
    assert invoke("rollback", run.run_id, "20", "--wait", "--timeout", "0.1").exit_code == Exit.TIMED_OUT


def test_a_preview_changes_nothing_and_tells_all(client: Client, run: SavedRun) -> None:
    told = invoke("rollback", run.run_id, "20", "--set", "kl.coef=0.2", "--dry-run")
    assert told.exit_code == 0, told.output
    assert "left behind, and kept: iterations 21 to 40 of segment 1, 2 checkpoints" in told.output
    assert "kl.coef: 0.05 at the checkpoint, 0.05 now, 0.2 then" in told.output
    assert "30 iterations (21 to 50) ×" in told.output
    assert "nothing was changed" in told.output
    assert "segment 1, 1 checkpoint\n" in invoke("rollback", run.run_id, "30", "--dry-run").output
    assert "bit for bit" in invoke("rollback", run.run_id, "20", "--dry-run").output
    same = answer("rollback", run.run_id, "20", "--dry-run")
    assert same["repeats_exactly"] is True
    assert client.run(run.run_id)["open_commands"] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("20", "--set", "seed=9"), "/set/seed: seed cannot change within a run (it is 1): fork instead"),
        (("20", "--set", "kl.coef"), "write it as field.name=value"),
        (("25",), "there is no checkpoint '25'"),
    ],
)
def test_what_cannot_be_is_a_fault_of_usage(run: SavedRun, arguments: tuple[str, ...], words: str) -> None:
    done = invoke("rollback", run.run_id, *arguments)
    assert words in done.output, done.output
    assert done.exit_code in (Exit.USAGE, Exit.FAILED)


def test_a_run_that_changed_since_it_was_looked_at_is_left_alone(client: Client, run: SavedRun) -> None:
    seen = client.run(run.run_id)["version"]
    state(run, "pausing")
    with pytest.raises(RequestError) as refused:
        client.rollback(run.run_id, client.checkpoints(run.run_id)[0]["id"], version=seen)
    assert refused.value.status == 412


def test_a_second_roll_back_is_refused_while_one_is_open(client: Client, run: SavedRun) -> None:
    target = client.checkpoints(run.run_id)[0]["id"]
    first = client.rollback(run.run_id, target, idempotency_key="mine")
    assert client.rollback(run.run_id, target, idempotency_key="mine")["id"] == first["id"]
    with pytest.raises(RefusedError, match="while a roll back is under way"):
        client.rollback(run.run_id, target)


def test_a_fork_is_a_run_of_its_own(client: Client, run: SavedRun) -> None:
    made = answer("fork", run.run_id, "1:20", "--name", "bolder", "--set", "seed=9", "--reason", "try")
    assert (made["name"], made["state"], made["iteration"]) == ("bolder", "queued", 20)
    assert made["url"].endswith(f"/runs/{made['id']}")
    told = invoke("lineage", made["id"]).output
    assert f"* {made['id']}  bolder  queued" in told
    assert f"1  fork from {run.run_id} 1:20, nothing trained  (active)" in told
    preview = answer("fork", run.run_id, "20", "--set", "seed=9", "--dry-run")
    assert [(change["path"], change["then"]) for change in preview["changes"]] == [("seed", 9)]
    assert [member["id"] for member in client.lineage(run.run_id)["runs"]] == [run.run_id, made["id"]]


def test_resume_and_retry_queue_what_rests(client: Client, run: SavedRun) -> None:
    state(run, "stopped")
    assert answer("resume", run.run_id)["status"] == "done"
    assert client.run(run.run_id)["state"] == "queued"
    state(run, "starting", "failed")
    refused = invoke("resume", run.run_id)
    assert (refused.exit_code, "retry it" in refused.output) == (Exit.USAGE, True)
    assert invoke("retry", run.run_id).exit_code == 0


def test_pause_and_checkpoint_are_asked(client: Client, run: SavedRun) -> None:
    assert answer("checkpoint", run.run_id)["kind"] == "checkpoint"
    assert answer("pause", run.run_id)["kind"] == "pause"
    assert client.run(run.run_id)["state"] == "pausing"
    assert invoke("pause", run.run_id, "--wait", "--timeout", "0.1").exit_code == Exit.TIMED_OUT


def test_segments_for_programs(run: SavedRun) -> None:
    invoke("rollback", run.run_id, "20", "--reason", "two\nlines")
    carry_out(run)
    lines = [line.split("\t") for line in invoke("segments", run.run_id).output.splitlines()]
    assert lines == [
        ["1", "start", "", "0", "40", "1-20", "", "ci", ""],
        ["2", "rollback", "active", "20", "20", "", "1:20", "ci", "two lines"],
    ]


def test_the_curl_lines_of_the_page_do_what_it_says(client: Client, run: SavedRun) -> None:
    """All of them, one after the other; a pause is refused by then, and two places are made up."""
    page = (Path(__file__).parents[2] / "docs" / "going-back.md").read_text()
    lines = "\n".join(re.findall(r"```bash\n(.*?)```", page, re.DOTALL))
    lines = re.sub(r"^ppo .*$", "", lines, flags=re.MULTILINE).replace("\nask ", "\necho; ask ")
    given = {
        "http://127.0.0.1:8600 PPO_KEY=...": f"{os.environ['PPO_URL']} PPO_KEY={os.environ['PPO_KEY']}",
        "RUN": run.run_id,
        "k-...": client.checkpoints(run.run_id)[1]["id"],
        "c-...": "c-madeup",
    }
    for placeholder, value in given.items():
        lines = lines.replace(placeholder, value)
    done = subprocess.run(["bash", "-c", lines], capture_output=True, text=True, check=False, timeout=60)
    answers = [json.loads(line) for line in done.stdout.splitlines() if line]
    assert len(answers) == lines.count("; ask "), done.stderr
    assert [one["code"] for one in answers if "code" in one] == ["not_found", "illegal_move", "not_found"]
    assert [(one["kind"], one["status"]) for one in answers if "kind" in one] == [("rollback", "pending")]
    assert [one["name"] for one in answers if "num_iterations" in one] == ["bolder"]


def test_kill_says_what_it_did_and_of_an_ended_run_how_it_ended(client: Client, run: SavedRun) -> None:
    asked = answer("kill", run.run_id)
    assert (asked["kind"], asked["status"], client.run(run.run_id)["state"]) == ("kill", "pending", "killing")
    assert client.kill(run.run_id)["id"] == asked["id"]
    with run.sessions.begin() as session:
        carry_out_kill(session, session.get_one(Run, run.run_id))
    over = invoke("kill", run.run_id)
    assert (over.exit_code, "has already been cancelled at iteration 40" in over.output) == (0, True)
    assert invoke("kill", run.run_id, "--wait").exit_code == Exit.STOPPED
    assert answer("retry", run.run_id)["status"] == "done"
