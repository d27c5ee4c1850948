"""What errors of the database are called, and what standing still in a transaction becomes."""

from __future__ import annotations

import time

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from api.errors import as_problem
from store.session import AWAY, describe, is_row_held, is_served, make_engine
from tests.real_postgres import RealPostgres


def test_a_held_row_is_not_called_a_database_that_is_away(database_url: str) -> None:
    engine = make_engine(database_url)
    with engine.connect() as holder, engine.connect() as waiting:
        holder.execute(text("LOCK TABLE runs"))
        waiting.execute(text("SET LOCAL lock_timeout = 50"))
        with pytest.raises(OperationalError) as caught:
            waiting.execute(text("SELECT * FROM runs"))
    engine.dispose()
    assert is_row_held(caught.value)
    assert is_served(caught.value)
    assert describe(caught.value) == "a row is held by somebody else"
    problem = as_problem(caught.value)
    assert problem is not None
    assert (problem.status, problem.code, problem.headers) == (503, "busy", {"Retry-After": "2"})


def test_who_stood_still_in_a_transaction_may_try_again(database_url: str) -> None:
    engine = make_engine(database_url, pool_size=1, still_s=0.1)
    with engine.connect() as connection:
        connection.execute(text("SELECT 1"))
        time.sleep(0.5)
        with pytest.raises(AWAY) as caught:
            connection.execute(text("SELECT 1"))
    assert is_served(caught.value)
    assert not is_row_held(caught.value)
    assert "stood still in a transaction" in describe(caught.value)
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT 1")) == 1
    engine.dispose()


def test_a_server_that_is_not_there_is_away(own_postgres: RealPostgres) -> None:
    engine = make_engine(own_postgres.url)
    own_postgres.stop()
    with pytest.raises(AWAY) as caught:
        engine.connect()
    assert not is_served(caught.value)
    assert describe(caught.value).startswith("the database is away: ")
    problem = as_problem(caught.value)
    assert problem is not None
    assert (problem.status, problem.code) == (503, "database_unavailable")
