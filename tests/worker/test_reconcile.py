"""What the reconciler puts right, one look at a time."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy import event, func, select, update
from sqlalchemy.exc import OperationalError

from ppo_core.rundir import JournalWriter
from store.commands import request_command
from store.leases import end_still_sessions, session_name
from store.models import Checkpoint, MetricPoint, Run, WorkerSlot
from store.session import make_engine
from tests.worker.conftest import Claimed
from tests.worker.platform import wait_until
from worker.clock_watch import ClockWatch
from worker.reconcile import Reconciler
from worker.settings import WorkerSettings


@pytest.fixture
def reconciler(claimed: Claimed, database_url: str) -> Iterator[Reconciler]:
    settings = WorkerSettings(
        database_url=database_url, data_dir=claimed.data, lease_s=0.01, renew_s=0.005, poll_s=0.01
    )
    reconciler = Reconciler(settings)
    # On a busy machine this process stands still for longer than half of so short a lease, which looks like a jump.
    reconciler._clock = ClockWatch(tolerance_s=60.0)
    yield reconciler
    reconciler._let_go()
    reconciler.engine.dispose()


def _expire(claimed: Claimed) -> None:
    with claimed.sessions.begin() as session:
        session.execute(update(Run).values(lease_expires_at=func.now() - timedelta(seconds=1)))


@contextmanager
def _held_by(name: str, claimed: Claimed, reconciler: Reconciler) -> Iterator[None]:
    """The run's row locked by a session of this name, which does nothing more."""
    engine = make_engine(reconciler.settings.database_url, name=name)
    with engine.connect() as connection:
        connection.execute(select(Run.id).where(Run.id == claimed.run_id).with_for_update())
        yield
        connection.invalidate()
    engine.dispose()


def _journal(claimed: Claimed, *events: tuple[Any, int, dict[str, Any]]) -> None:
    claimed.prepare()
    journal = JournalWriter(claimed.segment().journal)
    journal.append("started", 0, {"token": claimed.token})
    for line in events:
        journal.append(*line)
    journal.close()


def test_run_with_a_living_lease_is_left_alone(claimed: Claimed, reconciler: Reconciler) -> None:
    with claimed.sessions.begin() as session:
        session.execute(update(Run).values(lease_expires_at=func.now() + timedelta(seconds=60)))
    reconciler.look()
    assert claimed.run().state == "starting"


def test_lost_run_is_queued_with_its_journal_delivered_and_its_slot_free(
    claimed: Claimed, reconciler: Reconciler
) -> None:
    _journal(claimed, ("metrics", 1, {"a": 1.0}))
    _expire(claimed)
    reconciler.look()
    run = claimed.run()
    assert (run.state, run.reason_code, run.infrastructure_failures) == ("queued", "supervisor_lost", 1)
    with claimed.sessions() as session:
        assert session.scalars(select(MetricPoint.value)).all() == [1.0]
        assert session.scalars(select(WorkerSlot.run_id)).all() == [None]


def test_fault_that_only_the_journal_knows_fails_the_run(claimed: Claimed, reconciler: Reconciler) -> None:
    error = {"code": "reward", "message": "no scores", "hint": "look", "traceback": ""}
    _journal(claimed, ("end", 1, {"code": 65, "reason": "error", "error": error}))
    _expire(claimed)
    reconciler.look()
    run = claimed.run()
    assert (run.state, run.reason_code, run.reason_detail) == ("failed", "reward", "no scores")


@pytest.mark.parametrize("error", [{"code": "reward", "message": "no \0 score", "hint": 7}, "no \ud800 score"])
def test_a_last_word_of_any_shape_ends_the_run(claimed: Claimed, reconciler: Reconciler, error: Any) -> None:
    _journal(claimed, ("end", 1, {"code": 65, "reason": "error", "error": error}))
    _expire(claimed)
    reconciler.look()
    run = claimed.run()
    assert run.state == "failed"
    assert re.fullmatch("no . score", str(run.reason_detail))


def test_files_of_a_lost_attempt_that_are_not_what_they_should_be_do_not_keep_it(
    claimed: Claimed, reconciler: Reconciler
) -> None:
    """Recovering is no state to stay in: no slot, no kill and no retry is possible there."""
    _journal(claimed)
    claimed.segment().journal.unlink()
    claimed.segment().journal.mkdir()
    _expire(claimed)
    reconciler.look()
    assert claimed.run().state == "queued"


def test_checkpoint_that_a_lost_attempt_could_not_tell_of_is_taken_up(claimed: Claimed, reconciler: Reconciler) -> None:
    """The trainer died between renaming it and saying so, the supervisor with it; the run stays where it is."""
    _journal(claimed, ("metrics", 5, {"a": 1.0}))
    claimed.save(5)
    with claimed.sessions.begin() as session:
        request_command(session, claimed.run_id, "stop", None, 60)
    _expire(claimed)
    reconciler.look()
    assert claimed.run().state == "stopped"
    with claimed.sessions() as session:
        row = session.scalars(select(Checkpoint)).one()
    assert (row.iteration, row.status) == (5, "good")


def test_run_whose_journal_cannot_be_read_does_not_hold_up_the_rest(claimed: Claimed, reconciler: Reconciler) -> None:
    _journal(claimed)
    claimed.segment().journal.write_text("rubbish\n")
    _expire(claimed)
    reconciler.look()
    assert claimed.run().state == "queued"


def test_supervisor_that_stands_still_in_a_transaction_loses_its_run(claimed: Claimed, reconciler: Reconciler) -> None:
    """Frozen there, it would keep the row locked until the server gives up on it, a minute later."""
    _expire(claimed)
    with _held_by(session_name(claimed.run_id, claimed.token), claimed, reconciler):
        reconciler.look()
        assert claimed.run().state == "queued"


def test_whoever_stands_still_in_a_transaction_for_long_is_ended(
    claimed: Claimed, reconciler: Reconciler, database_url: str
) -> None:
    """The server counts no time for a session that was frozen in the middle of a pipeline."""
    with make_engine(database_url).connect() as still, psycopg.connect(database_url) as foreign:
        still.execute(select(Run.id).where(Run.id == claimed.run_id).with_for_update())
        foreign.execute("SELECT 1")
        with claimed.sessions.begin() as session:
            assert end_still_sessions(session, 60) == 0
            wait_until(lambda: end_still_sessions(session, 0.1) == 1)
        with pytest.raises(OperationalError):
            still.scalar(select(1))
        assert foreign.execute("SELECT 1").fetchone() == (1,), "it is none of the platform's"
        still.invalidate()
    claimed.lose()


def test_row_that_somebody_else_holds_does_not_hold_up_the_rest(claimed: Claimed, reconciler: Reconciler) -> None:
    event.listen(reconciler.engine, "connect", lambda raw, _: raw.execute("SET lock_timeout = '200ms'").close())
    _expire(claimed)
    with _held_by("a person", claimed, reconciler):
        reconciler.look()
        assert claimed.run().state == "starting"
    reconciler.look()
    assert claimed.run().state == "queued"


def test_silence_does_not_count_right_after_an_outage(claimed: Claimed, reconciler: Reconciler) -> None:
    _expire(claimed)
    reconciler._trust_leases_from = float("inf")
    reconciler.look()
    assert claimed.run().state == "starting"


def test_one_of_several_works(claimed: Claimed, reconciler: Reconciler) -> None:
    other = Reconciler(reconciler.settings)
    assert reconciler._holds_lock()
    assert reconciler._holds_lock()
    assert not other._holds_lock()
    reconciler._let_go()
    wait_until(other._holds_lock)  # the server takes a moment to notice
    other._let_go()
    other.engine.dispose()
