"""A reader of the live stream whose service is killed under it and started again."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import httpx

from store import keys
from tests.api.live_server import ServerProcess
from tests.api.stream_reader import read_messages
from tests.faults.stage import Stage

CATCH_UP_S = 60


class Reader(threading.Thread):
    """Reads the events of some runs, and goes on by the last id whenever its connection breaks."""

    def __init__(self, url: str, key: str, run_ids: Sequence[str]) -> None:
        super().__init__(daemon=True)
        self.seen: dict[str, list[int]] = {run_id: [] for run_id in run_ids}
        self.num_connections = 0
        self.over = threading.Event()
        self._url, self._headers = url, {"Authorization": f"Bearer {key}"}

    def run(self) -> None:
        last: str | None = None
        position = {"runs": ",".join(f"{run_id}:0" for run_id in self.seen)}
        while not self.over.is_set():
            headers = {**self._headers, **({"Last-Event-ID": last} if last else {})}
            with (
                contextlib.suppress(httpx.TransportError),
                httpx.Client(timeout=5, trust_env=False) as http,
                http.stream("GET", f"{self._url}/v1/stream", params=position, headers=headers) as reply,
            ):
                self.num_connections += 1
                for message in read_messages(reply):
                    last = message.id or last
                    if message.event == "run":
                        self.seen[message.data["run"]].append(message.data["seq"])
                    if self.over.is_set():
                        return
            time.sleep(0.1)


@contextmanager
def read_over_restarts(stage: Stage, run_ids: Sequence[str]) -> Iterator[Callable[[], None]]:
    """Gives what kills the service and starts it again. In the end every event was read, each once and in order."""
    platform = stage.platform
    with platform.sessions.begin() as session:
        key = keys.create_key(session, f"reader {time.monotonic()}", "viewer")[1]
    server = ServerProcess(platform.database_url, platform.data)
    reader = Reader(server.url, key, run_ids)
    reader.start()

    def kill_and_start() -> None:
        connected = reader.num_connections
        server.kill()
        server.start()
        deadline = time.monotonic() + CATCH_UP_S
        while reader.num_connections == connected:
            assert time.monotonic() < deadline, "the reader found no service"
            time.sleep(0.05)

    try:
        yield kill_and_start
        wanted = {run_id: list(range(1, platform.run(run_id).event_seq + 1)) for run_id in run_ids}
        deadline = time.monotonic() + CATCH_UP_S
        while reader.seen != wanted and time.monotonic() < deadline:
            time.sleep(0.1)
        assert reader.seen == wanted
    finally:
        reader.over.set()
        server.close()
        reader.join(10)
