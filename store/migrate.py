"""Bring a database to this version's schema: `python -m store.migrate`.

Safe when several processes start at once: one transaction holds an advisory lock for all revisions, so the others
wait and then find nothing to do, and a migration that dies leaves nothing behind.
"""

from __future__ import annotations

import sys
from importlib.resources import files

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from store.session import make_engine
from store.settings import DatabaseSettings

_LOCK = 7_370_001


class MigrationError(Exception):
    """A revision could not be applied; the message names it. The database is as it was before."""


def alembic_config(connection: Connection | None = None) -> Config:
    """Alembic's settings, made in code: there is no ini file to find."""
    config = Config()
    config.set_main_option("script_location", str(files("store") / "migrations"))
    if connection is not None:
        config.attributes["connection"] = connection
    return config


def pending_revisions(connection: Connection) -> list[str]:
    """The revisions that the database lacks, in the order to apply.

    Raises:
        MigrationError: the database is at a revision that this version does not know.
    """
    scripts = ScriptDirectory.from_config(alembic_config())
    known = [script.revision for script in scripts.walk_revisions()][::-1]
    current = MigrationContext.configure(connection).get_current_revision()
    if current is None:
        return known
    if current not in known:
        raise MigrationError(
            f"the database is at revision {current}, which this version does not know: update it first"
        )
    return known[known.index(current) + 1 :]


def migrate(url: str) -> list[str]:
    """Apply what is missing, all or nothing. Returns the revisions applied.

    Raises:
        MigrationError: names the revision that failed.
    """
    engine = make_engine(url, pool_size=1)
    try:
        with engine.begin() as connection:
            # Others may hold the lock for as long as a migration takes.
            connection.execute(text("SET LOCAL lock_timeout = 0"))
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
            revisions = pending_revisions(connection)
            config = alembic_config(connection)
            for revision in revisions:
                try:
                    command.upgrade(config, revision)
                except Exception as error:
                    raise MigrationError(f"revision {revision} failed: {error}") from error
            return revisions
    finally:
        engine.dispose()


def main() -> int:
    try:
        applied = migrate(DatabaseSettings().database_url)
    except MigrationError as error:
        print(f"migration failed: {error}", file=sys.stderr)
        return 1
    print(f"applied {', '.join(applied)}" if applied else "the schema is up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
