"""What ends mean, as pure decisions, and how they are written."""

import errno
from collections.abc import Callable

import pytest
from sqlalchemy.orm import Session

from ppo_core.rundir import RankExit
from store import workers
from store.commands import request_command
from store.ids import new_id
from store.models import Run
from store.queue import claim
from store.runs import LeaseLost, create_run, transition
from worker.outcome import EndedBy, Outcome, from_end, stopped_unasked, without_end, without_files, write_outcome

ERROR = {"code": "reward", "message": "too few scores", "hint": "run it by hand", "traceback": ""}


@pytest.mark.parametrize(
    ("code", "reason", "kind", "reason_code"),
    [
        (0, "goal", "succeeded", "goal"),
        (10, "paused", "paused", "paused"),
        (10, "gate", "paused", "gate"),
        (11, "stopped", "stopped", "stopped"),
        (64, "error", "failed", "reward"),
        (65, "error", "failed", "reward"),
        (70, "error", "failed", "reward"),
        (69, "guard", "stopped", "guard"),
        (75, "stopped", "requeued", "drained"),
        (42, "", "failed", "trainer_fault"),
    ],
)
def test_code_of_the_last_word_decides(code: int, reason: str, kind: str, reason_code: str) -> None:
    outcome = from_end({"code": code, "reason": reason, "error": ERROR if code in (64, 65, 70) else None}, 20, False)
    assert (outcome.kind, outcome.code) == (kind, reason_code)


def test_a_pause_with_an_error_says_what_holds_it_up() -> None:
    outcome = from_end({"code": 10, "reason": "disk_full", "error": {**ERROR, "code": "disk_full"}}, 20, False)
    assert outcome == Outcome("paused", "disk_full", "too few scores", "run it by hand")


@pytest.mark.parametrize(("code", "kind"), [(10, "paused"), (69, "stopped")])
def test_an_end_by_an_alert_says_which_and_where_to_look(code: int, kind: str) -> None:
    end = {"code": code, "reason": "guard", "error": None, "why": "Entropy has collapsed", "hint": "see its alerts"}
    outcome = from_end(end, 20, False)
    detail = "Entropy has collapsed; saved at iteration 20"
    assert (outcome.kind, outcome.detail, outcome.hint) == (kind, detail, "see its alerts")


def test_a_full_disk_pauses_and_another_fault_of_the_folder_is_a_loss_once_it_trained() -> None:
    full, broken = OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EIO, "Input/output error")
    assert without_files(full, started=False).kind == without_files(full, started=True).kind == "paused"
    assert without_files(broken, started=True).kind == "lost"
    assert without_files(broken, started=False).kind == "failed"


def test_stop_of_a_draining_worker_requeues() -> None:
    assert from_end({"code": 11, "reason": "stopped", "error": None}, 20, draining=True).kind == "requeued"


def test_no_last_word_is_a_loss_that_names_the_signal() -> None:
    outcome = without_end([RankExit(0, -9)], None, None, draining=False)
    assert (outcome.kind, outcome.detail) == ("lost", "trainer ended without a word (signal 9)")
    assert "out of memory" in str(outcome.hint)


def test_no_last_word_of_several_ranks_names_the_rank_and_its_log() -> None:
    killed = without_end([RankExit(0, 1), RankExit(1, -9)], "rank_lost", "", draining=False)
    assert (killed.kind, killed.detail) == (
        "lost",
        "trainer ended without a word (rank 1: signal 9; rank 0: exit code 1)",
    )
    assert "out of memory" in str(killed.hint)
    left = without_end([RankExit(0, -9, ended=True), RankExit(1, 3)], "rank_lost", "", draining=False)
    assert left.hint == "Look at the end of the log of the attempt's rank 1."


@pytest.fixture
def running(session: Session) -> Run:
    workers.register(session, worker_id="w", host="h", pid=1, cpu_slots=1, gpus=0, version="0", data_token="t")
    run_id = new_id("r")
    run = create_run(session, run_id=run_id, name="n", spec={}, num_iterations=1, priority=0, gpus=0, created_by=None)
    assert claim(session, "w", 20) is not None
    return transition(session, run.id, "running")


def _nothing(session: Session, run: Run) -> None: ...


def _stop(session: Session, run: Run) -> None:
    request_command(session, run.id, "stop", None, 60)


def _pause(session: Session, run: Run) -> None:
    request_command(session, run.id, "pause", None, 60)


@pytest.mark.parametrize(
    ("asked", "kind", "state"),
    [
        (_nothing, "succeeded", "succeeded"),
        (_stop, "succeeded", "succeeded"),
        (_pause, "succeeded", "succeeded"),
        (_pause, "paused", "paused"),
        (_stop, "paused", "stopped"),
        (_stop, "stopped", "stopped"),
        (_nothing, "requeued", "queued"),
        (_stop, "requeued", "stopped"),
        (_pause, "requeued", "queued"),
        (_nothing, "lost", "queued"),
        (_stop, "lost", "stopped"),
        (_pause, "lost", "queued"),
        (_stop, "cancelled", "cancelled"),
        (_pause, "failed", "failed"),
    ],
)
def test_run_comes_to_rest(
    session: Session, running: Run, asked: Callable[[Session, Run], None], kind: str, state: str
) -> None:
    asked(session, running)
    write_outcome(session, running.id, 1, Outcome(kind, "code", "detail"))  # type: ignore[arg-type]
    assert (running.state, running.lease_worker, running.lease_expires_at) == (state, None, None)


def test_outcome_of_an_old_attempt_does_not_count(session: Session, running: Run) -> None:
    with pytest.raises(LeaseLost):
        write_outcome(session, running.id, 0, Outcome("failed", "code"))
    assert running.state == "running"


@pytest.mark.parametrize(
    ("code", "ended_by", "asked", "unasked"),
    [
        (11, "stalled", False, True),
        (11, "rank_lost", False, True),
        (11, "rank_lost", True, False),
        (11, "stalled", True, False),
        (11, None, False, False),
        (11, "deadline", True, False),
        (0, "stalled", False, False),
        (70, "stalled", False, False),
    ],
)
def test_a_stalled_trainer_that_obeys_its_end_was_not_stopped_by_anybody(
    code: int, ended_by: EndedBy | None, asked: bool, unasked: bool
) -> None:
    """Its last word says stopped; the run goes on from what it saved (seen on a busy machine: at rest, unasked)."""
    assert stopped_unasked({"code": code}, ended_by, asked) is unasked
