"""Real services for the tests. Nothing starts before a test asks for it.

postgres         the server; a test that stops it uses `own_postgres`
postgres_url     a migrated database shared by the session: for tests that roll back; it is empty at the end, too
module_url       a migrated database of the module's own: for tests that share an application
sessions         sessions of it that commit
session          a session on it whose transaction is rolled back, commits of the test included
database_url     a migrated database of the test's own: for tests with several connections or processes
redis_url        a real Redis on a unix socket, emptied before each test
"""

from __future__ import annotations

import functools
import os
import re

# Before torch: toys are too small to share out, and waiting threads cost more than they do. It also makes last digits,
# and so what a toy run learns, the same on machines of any number of cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session, sessionmaker
from xdist.scheduler import LoadScopeScheduling

from store.migrate import migrate
from store.models import Run
from store.session import make_engine, session_factory
from tests.real_postgres import RealPostgres
from tests.real_redis import RealRedis

# Processes of vLLM, and several ranks, take minutes to start on a machine that has other work.
ENGINES_TIMEOUT_S = 900

ROOT = Path(__file__).parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("engines") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(ENGINES_TIMEOUT_S))


class TwoQueues(LoadScopeScheduling):
    """Which tests one process runs after each other when two share them (`make test`).

    Modules stay whole, for their fixtures' sake. Those that start services, and those that start engines or ranks, are
    a queue each: two of a kind at once would be more than two cores can do within the promised deadlines.
    """

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        return queue_of(module)


@functools.cache
def queue_of(module: str) -> str:
    """The queue of a test module, by the marks that stand in it."""
    marks = set(re.findall(r"mark\.(\w+)", (ROOT / module).read_text(encoding="utf-8")))
    if "engines" in marks:
        return "engines"
    return "services" if marks & {"stack", "browser"} else module


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> TwoQueues:
    return TwoQueues(config, log)


@pytest.fixture(scope="session")
def postgres() -> Iterator[RealPostgres]:
    with RealPostgres() as server:
        yield server


@pytest.fixture(scope="session")
def _template_url(postgres: RealPostgres) -> str:
    url = postgres.create_database()
    migrate(url)
    return url


@pytest.fixture(scope="session")
def postgres_url(postgres: RealPostgres, _template_url: str) -> Iterator[str]:
    url = postgres.create_database(make_url(_template_url).database)
    yield url
    engine = make_engine(url, pool_size=1)
    with Session(engine) as session:
        left = session.scalars(select(Run.id)).all()
    engine.dispose()
    assert not left, "a test committed to the database of those that roll back: it needs module_url or database_url"


@pytest.fixture(scope="module")
def module_url(postgres: RealPostgres, _template_url: str) -> Iterator[str]:
    url = postgres.create_database(make_url(_template_url).database)
    yield url
    postgres.drop_database(url)


@pytest.fixture(scope="module")
def sessions(module_url: str) -> Iterator[sessionmaker[Session]]:
    engine = make_engine(module_url)
    yield session_factory(engine)
    engine.dispose()


@pytest.fixture
def session(postgres_url: str) -> Iterator[Session]:
    engine = make_engine(postgres_url, pool_size=1)
    connection = engine.connect()
    transaction = connection.begin()
    with Session(connection, expire_on_commit=False, join_transaction_mode="create_savepoint") as session:
        yield session
    transaction.rollback()
    connection.close()
    engine.dispose()


@pytest.fixture
def database_url(postgres: RealPostgres, _template_url: str) -> Iterator[str]:
    url = postgres.create_database(make_url(_template_url).database)
    yield url
    postgres.drop_database(url)


@pytest.fixture
def own_postgres() -> Iterator[RealPostgres]:
    with RealPostgres() as server:
        yield server


@pytest.fixture(scope="session")
def _redis() -> Iterator[RealRedis]:
    with RealRedis() as server:
        yield server


@pytest.fixture
def redis_url(_redis: RealRedis) -> str:
    _redis.flush()
    return _redis.url
