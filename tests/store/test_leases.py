"""Leases end by silence, silence is not counted while nobody could speak, and lost runs come back within a budget."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from store import leases, workers
from store.commands import request_command
from store.models import Run, Worker, WorkerSlot
from store.queue import claim
from store.recovery import WAITS_S, settle
from store.runs import LeaseLost, transition


@pytest.fixture
def claimed(session: Session, make_run: Callable[..., Run]) -> Run:
    run = make_run()
    workers.register(session, worker_id="w", host="h", pid=1, cpu_slots=1, gpus=0, version="0", data_token="t")
    assert claim(session, "w", 20) is not None
    return run


def _overdue(session: Session, run: Run) -> None:
    past = func.clock_timestamp() - timedelta(seconds=1)
    session.execute(update(Run).where(Run.id == run.id).values(lease_expires_at=past))


def test_renewing_holds_an_overdue_lease_on(session: Session, claimed: Run) -> None:
    _overdue(session, claimed)
    assert leases.expired(session, 0) == [(claimed.id, 1)]
    leases.renew(session, claimed.id, 1, 20)
    assert leases.expired(session, 0) == []


def test_a_lease_is_held_for_a_supervisor_until_it_speaks_or_is_to_be_killed(session: Session, claimed: Run) -> None:
    def is_held(token: int = 1) -> bool:
        _overdue(session, claimed)
        leases.hold_for_starting(session, [(claimed.id, token), ("r-other", 1)], 20)
        return leases.expired(session, 0) == []

    assert is_held()
    assert not is_held(token=2)
    request_command(session, claimed.id, "stop", None, 60)
    assert is_held()
    request_command(session, claimed.id, "kill", None, 60)
    assert not is_held()


def test_one_that_spoke_holds_its_lease_itself(session: Session, claimed: Run) -> None:
    session.execute(update(Run).where(Run.id == claimed.id).values(supervisor_pid=7))
    _overdue(session, claimed)
    leases.hold_for_starting(session, [(claimed.id, 1)], 20)
    assert leases.expired(session, 0) == [(claimed.id, 1)]


def test_expiry_waits_until_postgres_has_been_up_for_a_lease(session: Session, claimed: Run) -> None:
    _overdue(session, claimed)
    assert leases.expired(session, lease_s=3600) == []


def test_old_token_and_lost_run_cannot_renew(session: Session, claimed: Run) -> None:
    with pytest.raises(LeaseLost):
        leases.renew(session, claimed.id, 0, 20)
    transition(session, claimed.id, "recovering")
    with pytest.raises(LeaseLost):
        leases.renew(session, claimed.id, 1, 20)


def test_lost_run_is_requeued_with_growing_waits_until_the_budget_is_spent(session: Session, claimed: Run) -> None:
    waits = []
    for _ in WAITS_S:
        transition(session, claimed.id, "recovering")
        settle(session, claimed.id, expect_token=claimed.lease_token, code="supervisor_lost", detail="gone")
        assert claimed.state == "queued"
        waits.append(
            session.scalar(select(func.extract("epoch", Run.not_before - func.now())).where(Run.id == claimed.id))
        )
        session.execute(update(Run).where(Run.id == claimed.id).values(not_before=None))
        assert claim(session, "w", 20) is not None
    assert [float(wait or 0) for wait in waits] == list(WAITS_S)
    transition(session, claimed.id, "recovering")
    settle(session, claimed.id, expect_token=claimed.lease_token, code="supervisor_lost", detail="gone")
    assert (claimed.state, claimed.reason_code) == ("failed", "supervisor_lost")
    assert "lost 4 times" in str(claimed.reason_detail)


def test_lost_run_that_was_to_stop_is_stopped(session: Session, claimed: Run) -> None:
    command = request_command(session, claimed.id, "stop", "ada", 60)
    transition(session, claimed.id, "recovering")
    settle(session, claimed.id, expect_token=1, code="supervisor_lost", detail="the supervisor is gone")
    session.refresh(command)
    assert (claimed.state, command.status) == ("stopped", "done")


def test_silent_worker_is_gone_and_back_with_its_next_heartbeat(session: Session, claimed: Run) -> None:
    session.execute(update(Worker).values(heartbeat_at=func.now() - timedelta(seconds=9)))
    assert workers.mark_silent(session, 3600) == []
    assert workers.mark_silent(session, 0.001) == ["w"]
    assert workers.heartbeat(session, "w") == "active"


def test_fewer_slots_leave_those_in_use(session: Session, claimed: Run) -> None:
    def slots() -> list[tuple[int, str | None]]:
        statement = select(WorkerSlot.index, WorkerSlot.run_id).order_by(WorkerSlot.index)
        return [(index, run) for index, run in session.execute(statement)]

    again = {"worker_id": "w", "host": "h", "pid": 2, "gpus": 0, "version": "0", "data_token": "t"}
    workers.register(session, cpu_slots=3, **again)
    assert slots() == [(0, claimed.id), (1, None), (2, None)]
    workers.register(session, cpu_slots=0, **again)
    assert slots() == [(0, claimed.id)]


def test_slot_of_a_run_that_is_elsewhere_is_freed(session: Session, claimed: Run) -> None:
    assert workers.free_stray_slots(session) == 0
    session.execute(update(Run).where(Run.id == claimed.id).values(lease_worker=None))
    assert workers.free_stray_slots(session) == 1
