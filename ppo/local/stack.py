"""The platform's processes on one machine, as one context manager: `ppo up` and the tests start the same stack.

    with Stack(Path("data"), port=0) as stack:
        ...  # stack.url, stack.admin_key, stack.login_link()

Start: Postgres, Redis, migrations, then api, worker and reconciler, each checked. Stop, in the order in which nothing
is lost: the worker first (its runs save and go back to the queue), Postgres last.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import psutil
from sqlalchemy.exc import SQLAlchemyError

from ppo.access import Access, read_client_file
from ppo.local import bootstrap
from ppo.local.home import Home
from ppo.local.postgres import Postgres
from ppo.local.processes import Child, Keeper, StackError, wait_until
from ppo.local.redis_server import RedisServer, program
from store.migrate import MigrationError, migrate

HOST = "127.0.0.1"
DEFAULT_PORT = 8600
PORTS_TO_TRY = 100
READY_DEADLINE_S = 60.0
DRAIN_S = 60.0  # a draining worker's runs write a checkpoint each
WORKER_GRACE_S = DRAIN_S + 15.0
API_GRACE_S = 12.0
RECONCILER_GRACE_S = 5.0

PYTHON = [sys.executable, "-m"]


def silent(line: str) -> None:
    """A `report` that says nothing."""


class Stack:
    """Everything that a platform on this machine consists of.

    Args:
        data: the data folder; made where it is missing.
        port: the api's; when taken, the next free one. 0: any.
        roots: folders that specs may name files under; the current folder where none is given.
        database_url, redis_url: servers to use in place of the embedded ones.
        use_redis: False leaves Redis out: the worker then finds runs by looking.
        env: more settings for the processes (`PPO_...`).
        report: called with a line about each step.
    """

    def __init__(
        self,
        data: Path,
        *,
        port: int = DEFAULT_PORT,
        roots: Sequence[Path] = (),
        database_url: str | None = None,
        redis_url: str | None = None,
        use_redis: bool = True,
        env: Mapping[str, str] | None = None,
        report: Callable[[str], None] = silent,
    ) -> None:
        self.data = data
        self._port = port
        self._roots = [root.resolve() for root in roots] or [Path.cwd()]
        self.database_url = database_url
        self.redis_url = redis_url
        self._use_redis = use_redis
        self._more_env = dict(env or {})
        self._report = report
        self.home: Home | None = None
        self.postgres: Postgres | None = None
        self.redis: RedisServer | None = None
        self.api: Child | None = None
        self.worker: Child | None = None
        self.reconciler: Child | None = None
        self.keeper = Keeper(report)
        self.hurry = threading.Event()
        self.stopping = False
        self.url = ""
        self.admin_key = ""
        self._listener: socket.socket | None = None

    # Start

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def start(self) -> None:
        """Start everything and return once the api is ready.

        Raises:
            StackError: what could not start, and the end of its log.
        """
        self.home = Home(self.data)
        self.data = self.home.data
        self._end_leftovers()
        self.keeper.start()
        self._start_servers()
        assert self.database_url is not None
        self._listener = self._listen()
        self.url = f"http://{HOST}:{self._listener.getsockname()[1]}"
        self._start_processes(self._environment())
        before = read_client_file(self.data)
        self.admin_key = bootstrap.admin_key(self.database_url, before.key if before else None)
        self.home.say_where(self.url)
        self.home.write_access(Access(self.url, self.admin_key))

    def _start_servers(self) -> None:
        assert self.home is not None
        if self.database_url is None:
            self.postgres = Postgres(self.home.postgres, self.home.sockets, self.home.log("postgres"))
            with self._step("Postgres (embedded)"):
                self.postgres.start()
            self.keeper.keep(self.postgres.child)
            self.database_url = self.postgres.url
        with self._step("database schema"):
            try:
                migrate(self.database_url)
            except (MigrationError, SQLAlchemyError) as error:
                raise StackError(f"the database cannot be used: {error}") from error
        server = program() if self._use_redis and self.redis_url is None else None
        if server is not None:
            self.redis = RedisServer(server, self.home.redis, self.home.sockets, self.home.log("redis"))
            with self._step("Redis (embedded)"):
                self.redis.start()
            self.keeper.keep(self.redis.child)
            self.redis_url = self.redis.url
        elif self.redis_url is None:
            self._report("no Redis here: the worker looks for new runs by itself every few seconds")

    def _start_processes(self, env: dict[str, str]) -> None:
        assert self.home is not None
        assert self._listener is not None
        listener = self._listener.fileno()
        self.api = Child(
            "api", [*PYTHON, "api.main", "--fd", str(listener)], self.home.log("api"), env, pass_fds=[listener]
        )
        worker = "worker.app" if self.redis_url else "worker.loop"
        self.worker = Child("worker", [*PYTHON, worker], self.home.log("worker"), env)
        self.reconciler = Child("reconciler", [*PYTHON, "worker.reconcile"], self.home.log("reconciler"), env)
        for child in (self.api, self.worker, self.reconciler):
            child.start()
        with self._step("api, worker, reconciler"):
            wait_until(self._is_ready, self.api, READY_DEADLINE_S)
            wait_until(self._has_worker, self.worker, READY_DEADLINE_S)
        for child in (self.api, self.worker, self.reconciler):
            self.keeper.keep(child)

    def _environment(self) -> dict[str, str]:
        assert self.home is not None
        env = {name: value for name, value in os.environ.items() if name not in ("DATABASE_URL", "REDIS_URL")}
        env |= {
            "DATABASE_URL": self.database_url or "",
            "PPO_DATA_DIR": str(self.data),
            "PPO_ROOTS": os.pathsep.join(map(str, self._roots)),
            "PPO_DRAIN_S": str(DRAIN_S),
            "PYTHONUNBUFFERED": "1",
            # Not the current folder: a user's own `api` or `store` there must not take our modules' place.
            "PYTHONSAFEPATH": "1",
        }
        if self.redis_url:
            env["REDIS_URL"] = self.redis_url
        return env | self._more_env

    def _listen(self) -> socket.socket:
        """The api's socket. It stays open here, so the address is kept while the api is started again."""
        candidates = [0] if self._port == 0 else range(self._port, self._port + PORTS_TO_TRY)
        for port in candidates:
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((HOST, port))
            except OSError:
                listener.close()
                continue
            listener.listen(256)
            if port != self._port:
                self._report(f"port {self._port} is taken; taking {port}")
            return listener
        raise StackError(f"no free port from {self._port} to {self._port + PORTS_TO_TRY - 1}; give another with --port")

    def _is_ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/readyz", timeout=2, trust_env=False).status_code == 200
        return False

    def _has_worker(self) -> bool:
        """Whether the worker of this start has announced itself."""
        assert self.database_url is not None
        assert self.worker is not None
        return bootstrap.worker_is_registered(self.database_url, self.worker.pid)

    def login_link(self) -> str:
        """An address that signs one browser in as admin, once."""
        assert self.database_url is not None
        return bootstrap.login_link(self.database_url, self.url)

    # Stop

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop everything that was started; safe to call at any point and twice. `hurry` ends all waiting."""
        self.stopping = True
        if self.home is None:  # nothing was started, and what runs on the folder is another platform's
            return
        self.keeper.release()
        self._stop_child(self.worker, WORKER_GRACE_S, "worker: runs save and go back to the queue")
        self._end_supervisors()
        self._stop_child(self.reconciler, RECONCILER_GRACE_S, None)
        self._stop_child(self.api, API_GRACE_S, None)
        if self.redis is not None:
            self.redis.stop()
        if self.postgres is not None:
            self.postgres.stop()
        self.keeper.join()
        if self._listener is not None:
            self._listener.close()
        self.home.close()
        self.home = None

    def _stop_child(self, child: Child | None, grace_s: float, line: str | None) -> None:
        if child is None or not child.alive:
            return
        if line:
            self._report(f"stopping {line}")
        if not child.stop(grace_s, self.hurry):
            self._report(f"{child.name} did not end in time and was killed")

    # What an earlier start, or a killed worker, left behind

    def _ours(self, *words: str) -> list[psutil.Process]:
        """Processes of this data folder whose command line holds one of these words."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                named = process.pid != os.getpid() and set(words) & set(process.cmdline())
                if named and process.environ().get("PPO_DATA_DIR") == str(self.data):
                    found.append(process)
        return found

    def _end_leftovers(self) -> None:
        """End what a killed platform left running on this folder, so that it holds neither port nor socket."""
        left = self._ours("api.main", "worker.reconcile")
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=5)

    def _end_supervisors(self) -> None:
        """End supervisors that a drain left behind: without a database nobody could look after their runs."""
        left = self._ours("worker.supervise")
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()  # its trainer dies with it
        psutil.wait_procs(left, timeout=5)
        if left:
            runs = "1 run" if len(left) == 1 else f"{len(left)} runs"
            self._report(f"{runs} did not save in time: what was not saved is lost")

    @contextlib.contextmanager
    def _step(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._report(f"{what}: ready ({time.monotonic() - began:.1f} s)")
