"""Comparing the checkpoint that a run shall go back to: once a command, in a thread, and within its time."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from sqlalchemy import func, select

from ppo_core.rundir import JournalWriter
from store.commands import request_command, time_out_unattended
from store.ids import new_id
from store.models import Checkpoint, Command
from store.rollback import Wish, open_rollback, request_rollback
from store.runs import transition
from tests.worker.conftest import Claimed
from tests.worker.platform import wait_until
from worker import supervise, target_check
from worker.delivery import Delivery
from worker.outcome import Outcome
from worker.settings import WorkerSettings
from worker.supervise import Supervisor
from worker.target_check import TargetChecks


@pytest.fixture
def asked(claimed: Claimed) -> str:
    """A running run that was asked to go back to iteration 5; the command."""
    claimed.prepare()
    journal = JournalWriter(claimed.segment().journal)
    journal.append("checkpoint", 5, claimed.save(5))
    journal.close()
    Delivery(claimed.sessions, claimed.run_id, 1, claimed.segment()).all(claimed.token)
    with claimed.sessions.begin() as session:
        transition(session, claimed.run_id, "running")
        target = session.scalars(select(Checkpoint)).one()
        wish = Wish(target.id, {}, {})
        return request_rollback(
            session, claimed.run_id, wish, command_id=new_id("c"), requested_by="ada", version=None, deadline_s=60
        ).id


def settled(claimed: Claimed, checks: TargetChecks, remaining_s: float = 60) -> bool:
    with claimed.sessions.begin() as session:
        found = open_rollback(session, claimed.run_id)
        return found is not None and checks.settled(session, found, claimed.run_dir, remaining_s)


def status(claimed: Claimed, command_id: str) -> str:
    with claimed.sessions() as session:
        return session.get_one(Command, command_id).status


def test_a_whole_one_is_known_by_the_commands_status(claimed: Claimed, asked: str) -> None:
    checks = TargetChecks()
    wait_until(lambda: settled(claimed, checks))
    assert status(claimed, asked) == "delivered"
    assert settled(claimed, TargetChecks()), "whoever comes later need not compare again"


def test_it_does_not_hold_up_its_caller_and_gives_up_in_time(
    claimed: Claimed, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is slower than the command's deadline: the run goes on."""
    slow = threading.Event()
    begun: list[object] = []

    def check(*arguments: object) -> None:
        begun.append(arguments)
        slow.wait(30)

    monkeypatch.setattr(target_check, "check_stored", check)
    checks = TargetChecks()
    assert not settled(claimed, checks)
    assert not settled(claimed, checks)
    assert status(claimed, asked) == "pending"
    assert not settled(claimed, checks, remaining_s=-1)
    slow.set()
    assert (status(claimed, asked), claimed.run().state, len(begun)) == ("timed_out", "running", 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_comparison_that_breaks_off_shows_nothing_to_be_whole(
    claimed: Claimed, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr(target_check, "check_stored", check)
    checks = TargetChecks()

    def ended() -> bool:
        assert not settled(claimed, checks)
        return status(claimed, asked) != "pending"

    wait_until(ended)
    assert (status(claimed, asked), claimed.run().state) == ("failed", "running")


def test_a_disk_that_does_not_answer_damages_no_checkpoint(
    claimed: Claimed, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(*arguments: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(target_check, "check_stored", check)
    checks = TargetChecks()

    def ended() -> bool:
        assert not settled(claimed, checks)
        return status(claimed, asked) != "pending"

    wait_until(ended)
    with claimed.sessions() as session:
        command = session.get_one(Command, asked)
        assert (command.status, session.scalars(select(Checkpoint)).one().status) == ("failed", "good")
        assert "Input/output error" in (command.detail or "")
    monkeypatch.undo()
    with claimed.sessions.begin() as session:
        session.get_one(Command, asked).status = "pending"
        session.get_one(Command, asked).finished_at = None
    wait_until(lambda: settled(claimed, checks))  # and asked again it is compared again


def test_a_removed_one_fails_the_command(claimed: Claimed, asked: str) -> None:
    with claimed.sessions.begin() as session:
        session.scalars(select(Checkpoint)).one().status = "removed"
    assert not settled(claimed, TargetChecks())
    assert (status(claimed, asked), claimed.run().state) == ("failed", "running")


def test_one_found_whole_is_not_too_late_for_its_run(claimed: Claimed, asked: str) -> None:
    """The reconciler was away from the comparison until after the deadline."""
    checks = TargetChecks()
    wait_until(lambda: settled(claimed, checks))
    with claimed.sessions.begin() as session:
        transition(session, claimed.run_id, "failed")
        session.get_one(Command, asked).deadline_at = func.now() - timedelta(seconds=1)
    with claimed.sessions.begin() as session:
        assert time_out_unattended(session) == 0
    assert status(claimed, asked) == "delivered"


def test_no_more_than_a_few_are_compared_at_once(claimed: Claimed, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait their turn, but not for ever."""
    monkeypatch.setattr(target_check, "MOST_AT_ONCE", 1)
    busy, checks = threading.Event(), TargetChecks()
    with monkeypatch.context() as patch:
        patch.setattr(target_check, "check_stored", lambda *_: busy.wait(30))
        checks.begin("c-other", claimed.run_dir, "segment-0001/checkpoints/iter-000005", "")
    assert not settled(claimed, checks)
    busy.set()
    wait_until(lambda: settled(claimed, checks))


def test_waiting_for_a_turn_ends_with_the_deadline(
    claimed: Claimed, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_check, "MOST_AT_ONCE", 0)
    checks = TargetChecks()
    assert not settled(claimed, checks)
    assert status(claimed, asked) == "pending"
    assert not settled(claimed, checks, remaining_s=-1)
    assert status(claimed, asked) == "timed_out"


@pytest.mark.parametrize("asked_to", ["drain", "stop", None])
def test_a_supervisor_that_compares_what_was_not_loaded_still_listens(
    claimed: Claimed, monkeypatch: pytest.MonkeyPatch, asked_to: str | None
) -> None:
    """The disk does not come to an end with it: a drain, a stop and the deadline do not wait."""
    claimed.prepare()
    journal = JournalWriter(claimed.segment().journal)
    journal.append("checkpoint", 5, claimed.save(5))
    journal.close()
    claimed.lose()
    claimed.claim()
    prepared = claimed.prepare()
    slow = threading.Event()
    monkeypatch.setattr(target_check, "check_stored", lambda *_: slow.wait(30))
    monkeypatch.setattr(supervise, "longest_comparison_s", lambda _: 30.0 if asked_to else 0.1)
    url = claimed.sessions.kw["bind"].url.render_as_string(hide_password=False)
    supervisor = Supervisor(WorkerSettings(DATABASE_URL=url, data_dir=claimed.data), claimed.run_id, claimed.token)
    supervisor.draining = asked_to == "drain"
    if asked_to == "stop":
        with claimed.sessions.begin() as session:
            request_command(session, claimed.run_id, "stop", "ada", 60)
    failed = Outcome("failed", "checkpoint", "it could not be loaded")
    try:
        outcome = supervisor._blame_checkpoint(prepared, failed)
    finally:
        slow.set()
        supervisor.engine.dispose()
    assert outcome.kind == ("lost" if asked_to else "failed")
