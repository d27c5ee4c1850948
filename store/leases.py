"""Leases: who looks after a run, and until when that is believed without a sign of life.

A claim raises `runs.lease_token`; whatever an older token says about state, commands or checkpoints no longer counts.
All times are the database's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import func, not_, select, text, tuple_, update
from sqlalchemy.orm import Session

from store.models import Run
from store.runs import LeaseLost, locked_run
from store.states import LIVE

_END_STILL = (
    "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = current_database()"
    " AND state LIKE 'idle in transaction%'"
)


def renew(session: Session, run_id: str, token: int, lease_s: float) -> None:
    """Hold the lease for another `lease_s`. An overdue one that nobody took away is simply held on.

    Raises:
        LeaseLost: another attempt was made, or the run was declared lost.
    """
    statement = (
        update(Run)
        .where(Run.id == run_id, Run.lease_token == token, Run.state.in_(LIVE))
        .values(lease_expires_at=func.clock_timestamp() + timedelta(seconds=lease_s))
        .returning(Run.id)
        .execution_options(synchronize_session=False)
    )
    if session.scalar(statement) is None:
        raise LeaseLost(f"run {run_id} is no longer held by lease {token}")


def hold_for_starting(session: Session, held: Sequence[tuple[str, int]], lease_s: float) -> None:
    """Hold leases, given as run and token, whose supervisors were started and have not come to speak for themselves.

    A run that is to be killed is none of them: whoever ends its lease ends it.
    """
    statement = update(Run).where(
        tuple_(Run.id, Run.lease_token).in_(held),
        Run.supervisor_pid.is_(None),
        Run.state.in_(("starting", "stopping")),
    )
    session.execute(
        statement.values(lease_expires_at=func.clock_timestamp() + timedelta(seconds=lease_s)),
        execution_options={"synchronize_session": False},
    )


def held_run(session: Session, run_id: str, token: int) -> Run:
    """The run's row, locked, if the lease still holds it: a run that was declared lost is the reconciler's.

    Raises:
        LeaseLost, RunNotFound
    """
    run = locked_run(session, run_id, expect_token=token)
    if run.state not in LIVE:
        raise LeaseLost(f"run {run_id} is {run.state}, no longer held by lease {token}")
    return run


def expired(session: Session, lease_s: float) -> list[tuple[str, int]]:
    """Runs with their tokens whose lease ran out.

    None while Postgres has been up for less than `lease_s`: nobody could renew while it was away, and everybody gets
    as long as a lease lasts to do so afterwards.
    """
    now, start = func.clock_timestamp(), func.pg_postmaster_start_time()
    statement = select(Run.id, Run.lease_token).where(
        Run.state.in_(LIVE),
        Run.lease_expires_at < now,
        # A start that is still to come was measured before the clock jumped back.
        not_(start.between(now - timedelta(seconds=lease_s), now)),
    )
    return [(run_id, token) for run_id, token in session.execute(statement.order_by(Run.id))]


def live(session: Session) -> list[tuple[str, int]]:
    """Runs with their tokens that somebody holds."""
    statement = select(Run.id, Run.lease_token).where(Run.state.in_(LIVE)).order_by(Run.id)
    return [(run_id, token) for run_id, token in session.execute(statement)]


def session_name(run_id: str, token: int) -> str:
    """What the database sessions of this lease's holder are called."""
    return f"ppo {run_id} {token}"


def end_stuck_sessions(session: Session, run_id: str, token: int) -> int:
    """End the sessions in which the holder of this lease stands still in a transaction; returns how many.

    A process that was frozen there would keep its run's row locked from everybody. One that only was late gets an
    error, as after a restart of the server, and connects again.
    """
    statement = text(f"{_END_STILL} AND application_name = :name")
    return len(session.execute(statement, {"name": session_name(run_id, token)}).all())


def end_still_sessions(session: Session, still_s: float) -> int:
    """End all sessions of the platform that have stood still in a transaction for so long; returns how many."""
    statement = text(
        f"{_END_STILL} AND application_name LIKE 'ppo%'"
        " AND state_change < clock_timestamp() - make_interval(secs => :still_s)"
    )
    return len(session.execute(statement, {"still_s": still_s}).all())
