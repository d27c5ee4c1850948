"""The migrations make the schema of the models, however many start at once."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text

from store.migrate import MigrationError, alembic_config, migrate
from store.models import Base
from store.session import make_engine
from store.states import MOVES
from tests.real_postgres import RealPostgres

EVERY = [script.revision for script in ScriptDirectory.from_config(alembic_config()).walk_revisions()][::-1]


def test_migrated_schema_is_the_models(postgres_url: str) -> None:
    engine = make_engine(postgres_url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_server_default": True})
        assert compare_metadata(context, Base.metadata) == []
    engine.dispose()


def test_check_constraints_are_those_of_the_models(postgres: RealPostgres, postgres_url: str) -> None:
    """Alembic does not compare these, so a schema made from the models is asked."""
    query = text("SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint WHERE contype = 'c' ORDER BY conname")
    from_models = make_engine(postgres.create_database())
    Base.metadata.create_all(from_models)
    migrated = make_engine(postgres_url)
    with from_models.connect() as one, migrated.connect() as other:
        assert one.execute(query).all() == other.execute(query).all() != []
    from_models.dispose()
    migrated.dispose()


def test_trigger_holds_the_map_of_states(postgres_url: str) -> None:
    engine = make_engine(postgres_url)
    with engine.connect() as connection:
        body = connection.scalar(text("SELECT prosrc FROM pg_proc WHERE proname = 'runs_check_move'"))
    engine.dispose()
    held = set(re.findall(r"'(\w+) (\w+)'", body))
    assert held == {(source, target) for source, targets in MOVES.items() for target in targets}


def test_five_at_once_all_succeed_and_one_does_the_work(postgres: RealPostgres) -> None:
    url = postgres.create_database()
    with ThreadPoolExecutor(5) as pool:
        applied = list(pool.map(lambda _: migrate(url), range(5)))
    assert sorted(len(revisions) for revisions in applied) == [0, 0, 0, 0, len(EVERY)]


def test_failing_revision_is_named_and_leaves_nothing(postgres: RealPostgres) -> None:
    url = postgres.create_database()
    engine = make_engine(url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE runs (in_the_way int)"))
    with pytest.raises(MigrationError, match="revision 0001 failed"):
        migrate(url)
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT to_regclass('api_keys')")) is None
    engine.dispose()


def test_newer_database_is_refused(database_url: str) -> None:
    engine = make_engine(database_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(MigrationError, match="9999"):
        migrate(database_url)


def test_command_says_what_it_did(postgres: RealPostgres) -> None:
    environment = {"DATABASE_URL": postgres.create_database(), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-m", "store.migrate"]
    outputs = [
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout for _ in range(2)
    ]
    assert outputs == [f"applied {', '.join(EVERY)}\n", "the schema is up to date\n"]
