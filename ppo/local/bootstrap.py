"""What the stack says to the database by itself; by hand, the first way in where the platform runs in containers.

python -m ppo.local.bootstrap [URL]     prints an admin key and a one-time login link
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import select
from sqlalchemy.orm import Session

from store import keys
from store.models import Worker
from store.session import make_engine, session_factory
from store.settings import DatabaseSettings

KEY_NAME = "command line on the platform's machine"


@contextmanager
def _session(database_url: str) -> Iterator[Session]:
    engine = make_engine(database_url, pool_size=1)
    try:
        with session_factory(engine).begin() as session:
            yield session
    finally:
        engine.dispose()


def admin_key(database_url: str, before: str | None = None) -> str:
    """`before` if it is an admin's key that may still be used, else a new one."""
    with _session(database_url) as session:
        row = keys.find_key(session, before) if before else None
        if before and row is not None and row.role == "admin":
            return before
        return keys.create_key(session, KEY_NAME, "admin")[1]


def login_link(database_url: str, url: str) -> str:
    """An address that signs one browser in as admin, once."""
    with _session(database_url) as session:
        return f"{url}/login#token={keys.create_login_link(session, 'admin')}"


def worker_is_registered(database_url: str, pid: int) -> bool:
    """Whether the worker process `pid` has announced itself."""
    with _session(database_url) as session:
        return session.scalar(select(Worker.pid).where(Worker.pid == pid)) is not None


def main() -> None:
    database_url = DatabaseSettings().database_url
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8600"
    print(f"sign in once: {login_link(database_url, url)}")
    print(f"command line: export PPO_URL={url} PPO_KEY={admin_key(database_url)}")


if __name__ == "__main__":
    main()
