"""What happens stands in the trainer's log, too, in words."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from ppo_core.logged_journal import LoggedJournal
from ppo_core.rundir import JournalWriter, read_journal

FINDINGS = [
    {"check": "prompts", "status": "warning", "detail": "3 of 90 prompts are too long", "remedy": "Shorten them."},
    {"check": "disk", "status": "ok", "detail": "there is room", "remedy": ""},
]
STARTED = {"pid": 7, "attempt": 2, "token": 3, "resumed_from": None, "first_iteration": 1, "versions": {}}


def test_events_are_journaled_and_logged_in_words(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ppo_core")
    journal = LoggedJournal(JournalWriter(tmp_path / "journal.jsonl"))
    journal.append("phase", 0, {"phase": "loading", "deadline_s": 5})
    journal.append("started", 0, STARTED)
    journal.append("started", 4, {**STARTED, "resumed_from": "iter-000004", "first_iteration": 5})
    journal.append("preflight", 4, {"findings": FINDINGS})
    journal.append("phase", 5, {"phase": "rollout", "deadline_s": 5})
    journal.append("metrics", 5, {"reward/score_mean": 0.51234, "response/length_mean": None, "policy/lr": 1e-4})
    journal.append("samples", 5, {"path": "samples/5.jsonl", "num": 2})
    journal.append("ack", 5, {"command": "c-1", "kind": "pause", "status": "done", "detail": None})
    journal.append("end", 5, {"code": 10, "reason": "paused", "error": None})
    journal.close()
    assert caplog.messages == [
        "loading",
        "attempt 2 begins with iteration 1, from the spec's policy",
        "attempt 2 begins with iteration 5, from iter-000004",
        "checks before the first iteration: 1 to look at\n  warning: 3 of 90 prompts are too long. Shorten them.",
        "iteration 5: reward/score_mean 0.5123, response/length_mean –",
        "pause (c-1): done",
        "ended at iteration 5: paused, code 10",
    ]
    events, _ = read_journal(tmp_path / "journal.jsonl")
    assert [event.type for event in events] == [
        "phase", "started", "started", "preflight", "phase", "metrics", "samples", "ack", "end",
    ]  # fmt: skip
    assert journal.last == events[-1]
