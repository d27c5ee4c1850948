"""`ppo workers`, `ppo logs`, `ppo edit` and `ppo rm` against the real service and files on disk."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import Result
from sqlalchemy import update
from sqlalchemy.orm import Session, sessionmaker
from typer.testing import CliRunner

from ppo import cli_logs
from ppo.cli import app
from ppo_core.rundir import segment_dir
from store import workers
from store.commands import request_command
from store.ids import new_id
from store.models import Run
from store.runs import create_run

pytestmark = pytest.mark.usefixtures("client")


@pytest.fixture(scope="module")
def data(folder: Path) -> Path:
    """The platform's data folder."""
    return folder / "data"


@pytest.fixture
def run(sessions: sessionmaker[Session], data: Path) -> str:
    """A run at its first attempt with a log of ten lines."""
    run_id = new_id("r")
    with sessions.begin() as session:
        create_run(
            session, run_id=run_id, name=f"name of {run_id}", spec={}, num_iterations=5, priority=0, gpus=0,
            created_by=None,
        )  # fmt: skip
        session.execute(update(Run).where(Run.id == run_id).values(attempt=1))
    path = log(data, run_id)
    path.parent.mkdir(parents=True)
    path.write_text("".join(f"line {number}\n" for number in range(10)))
    return run_id


def log(data: Path, run_id: str, attempt: int = 1, rank: int = 0) -> Path:
    return segment_dir(data / "runs" / run_id, 1).log(attempt, rank)


def stop(sessions: sessionmaker[Session], run_id: str) -> None:
    with sessions.begin() as session:
        request_command(session, run_id, "stop", None, 60)


def ppo(*words: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, list(words), input=stdin)


def test_workers_are_listed_drained_and_enabled(sessions: sessionmaker[Session]) -> None:
    with sessions.begin() as session:
        workers.register(
            session, worker_id="box", host="h", pid=1, cpu_slots=2, gpus=1, version="0.1", data_token="t",
            devices=[{"name": "NVIDIA H200", "memory_gib": 140.4}],
        )  # fmt: skip
    fields = ppo("workers").stdout.strip().split("\t")
    assert (fields[:6], fields[7]) == (["box", "h", "active", "0", "2", "1"], "0.1")
    (listed,) = json.loads(ppo("workers", "--json").stdout)
    assert (listed["slots"][0]["device"], listed["data_shared"]) == ("NVIDIA H200", False)
    assert ppo("workers", "drain", "box").stdout == "box is draining\n"
    assert json.loads(ppo("workers", "enable", "box", "--json").stdout)["state"] == "active"
    missing = ppo("workers", "drain", "nobody")
    assert (missing.exit_code, missing.stderr) == (2, "error: There is no worker 'nobody'. See `ppo workers`.\n")


def test_a_log_is_printed_whole_or_its_last_lines(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = "".join(f"line {number}\n" for number in range(10))
    assert ppo("logs", run).stdout == whole
    monkeypatch.setattr(cli_logs, "PIECE_BYTES", 16)  # two lines and a bit
    assert ppo("logs", run).stdout == whole
    assert ppo("logs", run, "--lines", "5").stdout == "".join(f"line {number}\n" for number in range(5, 10))
    assert ppo("logs", run, "--lines", "99").stdout == whole


@pytest.mark.parametrize(
    "words", [["--rank", "3"], ["--rank", "3", "--follow"], ["--attempt", "77"], ["--attempt", "77", "--search", "x"]]
)
def test_a_log_that_there_cannot_be_is_told(run: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_logs, "time", SimpleNamespace(sleep=lambda _: pytest.fail("it waits")))
    told = ppo("logs", run, *words)
    assert (told.exit_code, told.stdout) == (2, "")
    assert "has no log of attempt" in told.stderr
    assert "ppo ls" not in told.stderr


def test_a_log_is_searched(run: str) -> None:
    found = ppo("logs", run, "--search", "LINE 7")
    assert (found.exit_code, found.stdout) == (0, "49:line 7\n")
    assert ppo("logs", run, "--search", "nowhere").exit_code == 1
    assert json.loads(ppo("logs", run, "--search", "line 7", "--json").stdout)[0]["offset"] == 49
    assert ppo("logs", run, "--search", "x", "--follow").exit_code == 2


def test_the_supervisors_log_is_one_of_its_own(run: str, data: Path) -> None:
    (data / "runs" / run / "supervisor.log").write_text("looked after it\n")
    assert ppo("logs", run, "--supervisor").stdout == "looked after it\n"
    assert [item["source"] for item in json.loads(ppo("logs", run, "--json").stdout)] == ["trainer", "supervisor"]


def test_following_goes_over_to_the_next_attempt_and_ends_with_the_run(
    run: str, data: Path, sessions: sessionmaker[Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What happens meanwhile happens while it waits for more."""

    def first_ends() -> None:
        with log(data, run).open("a") as file:
            file.write("the last of the first\n")
        log(data, run, attempt=2).write_text("the second attempt\n")
        with sessions.begin() as session:
            session.execute(update(Run).where(Run.id == run).values(attempt=2))

    def second_ends() -> None:
        with log(data, run, attempt=2).open("a") as file:
            file.write("its end\n")
        stop(sessions, run)

    meanwhile = iter([first_ends, second_ends])
    monkeypatch.setattr(cli_logs, "time", SimpleNamespace(sleep=lambda _: next(meanwhile)()))
    followed = ppo("logs", run, "--follow", "--lines", "1")
    assert (followed.exit_code, followed.stderr) == (0, "== attempt 2\n")
    assert followed.stdout == "line 9\nthe last of the first\nthe second attempt\nits end\n"


def test_a_run_is_edited(run: str) -> None:
    assert ppo("edit", run).exit_code == 2
    edited = json.loads(
        ppo("edit", run, "--name", f"new {run}", "--notes", "a note", "--priority", "3", "--json").stdout
    )
    assert (edited["name"], edited["notes"], edited["priority"]) == (f"new {run}", "a note", 3)
    assert "  notes      a note\n" in ppo("get", run).stdout
    ppo("edit", run, "--notes", "one\ntwo")
    assert "  notes      one\n             two\n" in ppo("get", run).stdout
    assert json.loads(ppo("edit", run, "--notes", "", "--json").stdout)["notes"] is None


def test_a_run_is_deleted_after_a_question(run: str, sessions: sessionmaker[Session]) -> None:
    early = ppo("rm", run, "--yes")
    assert (early.exit_code, "stop it first" in early.stderr) == (2, True)
    stop(sessions, run)
    assert ppo("rm", run, stdin="n\n").exit_code == 1
    nobody = ppo("rm", run, stdin="")
    assert (nobody.exit_code, "give --yes" in nobody.stderr) == (2, True)
    assert ppo("get", run).exit_code == 0
    deleted = ppo("rm", run, stdin="y\n")
    assert (deleted.exit_code, f"({run}) is deleted" in deleted.stdout) == (0, True)
    assert ppo("rm", run, "--yes").exit_code == 2
