"""Engines and sessions, and which errors mean that the database is away rather than wrong.

An engine made before a fork must not be used after it: each process makes its own.
"""

from __future__ import annotations

from psycopg.errors import LockNotAvailable
from sqlalchemy import Engine, create_engine
from sqlalchemy.engine import make_url
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session, sessionmaker

# What a restart, a cut connection, a deadlock or a full pool raises: the same call may succeed a second later.
AWAY = (OperationalError, InterfaceError, PoolTimeout)


def psycopg_url(url: str) -> str:
    """The same address for SQLAlchemy with the psycopg 3 driver, whichever of the usual spellings it came in."""
    parsed = make_url(url)
    if parsed.drivername in ("postgres", "postgresql"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    return parsed.render_as_string(hide_password=False)


def make_engine(url: str, *, pool_size: int = 5, name: str = "ppo-control") -> Engine:
    """An engine that notices dead connections and gives up on a silent server within seconds.

    `name` is what the server knows its sessions by: at most 63 bytes.
    """
    return create_engine(
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
            "options": "-c timezone=UTC -c idle_in_transaction_session_timeout=60000 -c lock_timeout=10000",
        },
    )


def session_factory(engine: Engine) -> sessionmaker[Session]:
    """Sessions whose objects stay readable after the commit."""
    return sessionmaker(engine, expire_on_commit=False)


def is_row_held(error: BaseException) -> bool:
    """Whether this only says that somebody else held a row for longer than we wait."""
    return isinstance(error, OperationalError) and isinstance(error.orig, LockNotAvailable)
