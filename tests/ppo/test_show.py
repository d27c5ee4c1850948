"""What the command line prints about runs and faults."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import typer
from rich.console import Console

from ppo import cli_workers, show
from ppo_core.spec import Fault, SpecFaults

RUN: dict[str, Any] = {
    "id": "r-0123456789abcdef",
    "name": "reviews with a long name [bold] and a beta of 0.05",
    "state": "running",
    "health": "degraded",
    "phase": "rollout",
    "reason_code": "trainer_lost",
    "reason_detail": "Was lost once and restarted from its last checkpoint; last: trainer ended (signal 9).",
    "hint": "Nothing needs doing while it goes on.",
    "waiting_reason": None,
    "notes": None,
    "priority": 0,
    "iteration": 12,
    "num_iterations": 40,
    "created_at": "2026-01-02T03:04:05.678Z",
    "alerts": {"warning": 0, "critical": 0, "snoozed": 0},
    "latest": {"reward/score_mean": 0.51234},
}


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    text = io.StringIO()
    monkeypatch.setattr(show, "out", Console(file=text, width=80))
    return text


def test_the_table_of_80_columns_has_one_line_a_run_and_whole_ids(printed: io.StringIO) -> None:
    show.run_table([RUN, {**RUN, "name": "b"}])  # type: ignore[list-item]
    lines = printed.getvalue().splitlines()
    assert len(lines) == 3
    assert all(len(line) <= 80 for line in lines)
    assert all(line.startswith(RUN["id"]) for line in lines[1:])
    assert "…" in lines[1]
    assert all("12/40" in line and "0.5123" in line for line in lines[1:])


def test_a_queued_run_says_in_the_list_why_it_waits(printed: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show.out, "width", 140)
    show.run_table([{**RUN, "state": "queued", "waiting_reason": "Worker w is draining."}])  # type: ignore[list-item]
    assert "queued: Worker w is draining." in printed.getvalue()


def test_a_run_into_a_pipe_is_one_line_of_nine_fields(capsys: pytest.CaptureFixture[str]) -> None:
    show.run_lines([RUN])  # type: ignore[list-item]
    assert capsys.readouterr().out == (
        f"r-0123456789abcdef\t{RUN['name']}\trunning\ttrainer_lost\tdegraded\t12/40\t0.5123\t–\t2026-01-02T03:04:05.678Z\n"
    )


def test_a_page_of_a_run_shows_what_its_json_has_and_never_wraps(capsys: pytest.CaptureFixture[str]) -> None:
    show.run_page(RUN, "http://127.0.0.1/runs/r-0123456789abcdef")  # type: ignore[arg-type]
    text = capsys.readouterr().out
    assert "  state      running (trainer_lost) [degraded]\n" in text
    assert f"  why        {RUN['reason_detail']}\n" in text
    assert f"  remedy     {RUN['hint']}\n" in text
    assert "  priority   0\n" in text


@pytest.mark.parametrize(
    ("faults", "text"),
    [
        ([Fault("", "the spec is empty")], "error: the spec is empty\n"),
        ([Fault("/a", "unknown")], "error: The spec has 1 fault.\n  /a: unknown\n"),
        ([Fault("", "x"), Fault("/a", "y")], "error: The spec has 2 faults.\n  /: x\n  /a: y\n"),
    ],
)
def test_faults_have_the_services_heading(
    faults: list[Fault], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = io.StringIO()
    monkeypatch.setattr(show, "err", Console(file=told, width=80))
    with pytest.raises(typer.Exit) as left, show.errors(False):
        raise SpecFaults(faults)
    assert left.value.exit_code == 2
    assert told.getvalue() == text
    with pytest.raises(typer.Exit), show.errors(True):
        raise SpecFaults(faults)
    assert json.loads(capsys.readouterr().out)["error"]["detail"] == SpecFaults(faults).heading


@pytest.mark.parametrize(("held", "words"), [(1, "1 of its slots is still held"), (2, "2 of its slots are still held")])
def test_a_draining_worker_says_how_many_slots_are_held(
    held: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cli_workers._tell({"id": "box", "state": "draining", "busy_slots": held}, json=False)  # type: ignore[typeddict-item]
    assert words in capsys.readouterr().out
