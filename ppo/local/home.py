"""The data folder of a local platform: what lies where, and the lock that lets one platform use it at a time.

DATA/lock            held while a platform runs; says which process and where
DATA/client.json     address and key for the command line
DATA/postgres/       the database            DATA/sockets/   where Postgres and Redis listen
DATA/runs/           run directories         DATA/logs/      one file a process
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pwd
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import IO

from ppo.access import Access, client_file
from ppo.local.processes import StackError

# A socket's path may have 107 bytes; the longest name in the folder is Postgres's lock file.
MAX_SOCKET_FOLDER_BYTES = 107 - len("/.s.PGSQL.5432.lock")


class Home:
    """A locked data folder. Made where it is missing."""

    def __init__(self, data: Path) -> None:
        self.data = data.expanduser().resolve()
        try:
            # Not listable by others; passable, since root's Postgres runs under another account.
            self.data.mkdir(mode=0o711, parents=True, exist_ok=True)
            for folder in (self.logs, self.runs, self.redis):
                folder.mkdir(mode=0o700, exist_ok=True)
            self._lock = (self.data / "lock").open("a+", encoding="utf-8")
        except OSError as error:
            raise StackError(f"{self.data} cannot be used as data folder: {error}; give another with --data") from error
        self._take(self._lock)
        self.sockets = self._socket_folder()

    def _take(self, lock: IO[str]) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            try:
                holder = json.loads(lock.read())
                who = f"process {holder['pid']}" + (f", {holder['url']}" if holder.get("url") else ", still starting")
            except (ValueError, KeyError, TypeError):
                who = "still starting"
            lock.close()
            raise StackError(
                f"a platform already runs on {self.data} ({who}): use that one, end it with Ctrl-C where it runs, "
                "or take another folder with --data"
            ) from error
        self.say_where(None)

    def say_where(self, url: str | None) -> None:
        """Write into the lock file who holds it, for the one who comes second."""
        self._lock.seek(0)
        self._lock.truncate()
        json.dump({"pid": os.getpid(), "url": url}, self._lock)
        self._lock.flush()

    def write_access(self, access: Access) -> None:
        """Leave address and key for the command line, readable by this user only."""
        target = client_file(self.data)
        aside = target.with_suffix(".tmp")
        aside.unlink(missing_ok=True)
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(asdict(access), file)
        aside.replace(target)

    def close(self) -> None:
        """Let the next one have the folder."""
        self._lock.close()

    @property
    def logs(self) -> Path:
        return self.data / "logs"

    @property
    def runs(self) -> Path:
        return self.data / "runs"

    @property
    def redis(self) -> Path:
        return self.data / "redis"

    @property
    def postgres(self) -> Path:
        return self.data / "postgres"

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def _socket_folder(self) -> Path:
        folder = self.data / "sockets"
        if len(os.fsencode(folder)) > MAX_SOCKET_FOLDER_BYTES:
            # The same name at every start: what outlived a killed platform finds its database again.
            name = hashlib.sha256(os.fsencode(self.data)).hexdigest()[:12]
            folder = Path(tempfile.gettempdir()) / f"ppo-control-{os.geteuid()}-{name}"
        folder.mkdir(mode=0o700, exist_ok=True)
        ours = {os.geteuid()} | ({pwd.getpwnam("nobody").pw_uid} if os.geteuid() == 0 else set())
        if folder.is_symlink() or folder.stat().st_uid not in ours:
            raise StackError(f"{folder} belongs to somebody else; remove it, or take a data folder with a shorter path")
        folder.chmod(0o700)
        return folder
