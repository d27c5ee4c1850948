"""The service on a real port: in a thread of the test, or as a process that a test may kill."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import uvicorn

from api.main import Server, create_app
from api.settings import ApiSettings

READY_S = 60  # a second or two, and much longer beside other work


def wait_ready(url: str) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/readyz", timeout=5, trust_env=False).status_code == 200:
                return
        assert time.monotonic() < deadline, f"{url} was not ready within {READY_S} s"
        time.sleep(0.05)


@contextlib.contextmanager
def in_thread(settings: ApiSettings) -> Iterator[tuple[str, Server]]:
    """The real server in a thread; leaving is its graceful shutdown, and says so if that hangs."""
    app = create_app(settings)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=8)
    server = Server(config, app)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        wait_ready(url)
        yield url, server
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive(), "the server did not end within 10 s"


class ServerProcess:
    """`python -m api.main` as its users start it, on one port, killed and started again at will."""

    def __init__(self, database_url: str, folder: Path, roots: Path | None = None) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = (folder / "api.log").open("ab")
        self._env = {
            **{name: value for name, value in os.environ.items() if name not in ("REDIS_URL", "DATABASE_URL")},
            "DATABASE_URL": database_url,
            "PPO_DATA_DIR": str(folder),
            "PPO_ROOTS": str(roots or folder),
        }
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "api.main", "--port", str(self.port)], env=self._env, stderr=self._log
        )
        wait_ready(self.url)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        self._log.close()
