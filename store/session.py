"""Engines and sessions, and which errors mean that the database is away rather than wrong.

An engine made before a fork must not be used after it: each process makes its own.
"""

from __future__ import annotations

from psycopg.errors import DeadlockDetected, IdleInTransactionSessionTimeout, LockNotAvailable
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.engine import ExceptionContext, make_url
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session, sessionmaker

# What a restart, a cut connection, a deadlock or a full pool raises: the same call may succeed a second later.
AWAY = (OperationalError, InterfaceError, PoolTimeout)

# How long a row is waited for. Who holds one and stands still longer than a worker's processes may is ended before.
LOCK_WAIT_S = 10
# How long worker, supervisor and reconciler may stand still in a transaction: frozen ones keep no row for longer. The
# server does not count the time of one that was frozen in the middle of a pipeline, which is how many rows are
# inserted at once: `store.leases` ends those.
STILL_S = 4


def psycopg_url(url: str) -> str:
    """The same address for SQLAlchemy with the psycopg 3 driver, whichever of the usual spellings it came in."""
    parsed = make_url(url)
    if parsed.drivername in ("postgres", "postgresql"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    return parsed.render_as_string(hide_password=False)


def make_engine(url: str, *, pool_size: int = 5, name: str = "ppo-control", still_s: float = 60) -> Engine:
    """An engine that notices dead connections and gives up on a silent server within seconds.

    `name` is what the server knows its sessions by: at most 63 bytes. `still_s` is how long one may do nothing within a
    transaction until the server ends it.
    """
    engine = create_engine(
        psycopg_url(url),
        pool_size=pool_size,
        max_overflow=pool_size,
        pool_timeout=5,
        # A restarted server leaves dead connections in the pool; asking first turns them into fresh ones.
        pool_pre_ping=True,
        connect_args={
            "connect_timeout": 3,
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": 20_000,
            "application_name": name,
            "options": (
                f"-c timezone=UTC -c idle_in_transaction_session_timeout={round(still_s * 1000)}"
                f" -c lock_timeout={LOCK_WAIT_S * 1000}"
            ),
        },
    )
    event.listen(engine, "handle_error", _as_operational)
    return engine


def _as_operational(context: ExceptionContext) -> None:
    """A session that was ended for standing still is like one that a restart cut: the same call may succeed."""
    error = context.original_exception
    if isinstance(error, IdleInTransactionSessionTimeout):
        raise OperationalError(context.statement, context.parameters, error, connection_invalidated=True) from error


def session_factory(engine: Engine) -> sessionmaker[Session]:
    """Sessions whose objects stay readable after the commit."""
    return sessionmaker(engine, expire_on_commit=False)


def is_row_held(error: BaseException) -> bool:
    """Whether this only says that somebody else held a row for longer than we wait."""
    return isinstance(error, OperationalError) and isinstance(error.orig, LockNotAvailable | DeadlockDetected)


def is_served(error: BaseException) -> bool:
    """Whether it was this one transaction that failed, on a server that is there."""
    stood_still = isinstance(error, OperationalError) and isinstance(error.orig, IdleInTransactionSessionTimeout)
    return is_row_held(error) or stood_still


def describe(error: BaseException) -> str:
    """What one of `AWAY` says, in a line for a log."""
    if is_row_held(error):
        return "a row is held by somebody else"
    if is_served(error):
        return "this process stood still in a transaction, which the server ended"
    return f"the database is away: {str(error).splitlines()[0]}"
