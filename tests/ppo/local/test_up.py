"""`ppo up` as a process: what it starts, what it refuses, and what it leaves behind however it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from ppo.client import Client
from tests.ppo.local.conftest import TRAINER, wait_for

pytestmark = pytest.mark.stack

# What `make demo` promises for a second start, to a page that answers.
SECOND_START_S = 30

WriteSpec = Callable[..., Path]


class Up:
    """A `ppo up` on a data folder."""

    def __init__(self, data: Path, *more: str, **env: str) -> None:
        self.data = data
        data.parent.mkdir(parents=True, exist_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ppo.cli", "up", "--data", str(data), "--json", *more],
            env={**os.environ, "PPO_TRAINER_COMMAND": TRAINER, "PPO_POLL_S": "1", **env},
            stdout=subprocess.PIPE, stderr=(data.parent / "up.log").open("a"), text=True,
        )  # fmt: skip
        self.said: dict[str, Any] = {}

    def ready(self) -> Up:
        assert self.process.stdout is not None
        text = ""
        while not text.endswith("}\n"):
            line = self.process.stdout.readline()
            assert line, (self.data.parent / "up.log").read_text()
            text += line
        self.said = json.loads(text)
        return self

    @property
    def client(self) -> Client:
        return Client(**json.loads((self.data / "client.json").read_text()))

    def end(self, signum: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(signum)
        return self.process.wait(90)

    def __enter__(self) -> Up:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(90)
            except subprocess.TimeoutExpired:
                self.process.kill()
        for process in processes_of(self.data):
            process.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()


def processes_of(data: Path) -> list[psutil.Process]:
    """Everything alive that was started for a data folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
                continue
            words = " ".join(process.cmdline())
            if str(data) in words or process.environ().get("PPO_DATA_DIR") == str(data):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_cleanly_and_starts_again_on_the_same_data(tmp_path: Path, signum: signal.Signals) -> None:
    data = tmp_path / "data"
    with Up(data) as first:
        key = (first.ready().client, (data / "client.json").read_text())[1]
        assert first.end(signum) == 0
        assert not processes_of(data)
    began = time.monotonic()
    with Up(data) as second:
        url = second.ready().said["url"]
        assert httpx.get(url, follow_redirects=True).status_code in (200, 404)  # 404: the pages are not built
        assert time.monotonic() - began < SECOND_START_S
        assert json.loads(key)["key"] == json.loads((data / "client.json").read_text())["key"]


def test_a_drained_run_goes_on_after_the_next_start(tmp_path: Path, inputs: Path, write_spec: WriteSpec) -> None:
    data = tmp_path / "data"
    spec = write_spec(40, iteration_s=0.1).read_text()
    with Up(data, "--root", str(inputs)) as first:
        with first.ready().client as client:
            run = client.submit(absolute(spec, inputs))
            wait_for(lambda: client.run(run["id"])["iteration"] >= 2)
        assert first.end() == 0
        assert not processes_of(data), "a supervisor or trainer lived on"
    with Up(data, "--root", str(inputs)) as second, second.ready().client as client:
        ended = client.wait(run["id"], timeout_s=60)
        assert ended["state"] == "succeeded"
        assert ended["attempt"] == 2


def absolute(spec: str, inputs: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(spec)
    fields["policy"]["model"] = str(inputs / "policy")
    fields["data"]["prompts"] = str(inputs / "prompts.jsonl")
    fields["reward"]["sources"][0]["model"] = str(inputs / "reward")
    return fields


def test_two_at_once_on_one_folder_are_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with Up(data) as first:
        url = first.ready().said["url"]
        second = subprocess.run(
            [sys.executable, "-m", "ppo.cli", "up", "--data", str(data)], capture_output=True, text=True, check=False,
            timeout=30,
        )  # fmt: skip
        assert second.returncode == 1
        assert str(first.process.pid) in second.stderr
        assert url in second.stderr
        assert "--data" in second.stderr
        assert httpx.get(f"{url}/readyz").status_code == 200, "the first one goes on"


def test_a_killed_one_does_not_block_the_next(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with Up(data, "--port", "0") as first:
        port = first.ready().said["url"].rsplit(":", 1)[1]
        first.process.kill()
        first.process.wait(10)
        with Up(data, "--port", port) as second:
            assert second.ready().said["url"].endswith(f":{port}"), "the address was not free again"
            assert httpx.get(f"{second.said['url']}/readyz").status_code == 200
            assert second.end() == 0
        wait_for(lambda: not processes_of(data))


def test_a_stale_lock_of_postgres_is_no_obstacle(tmp_path: Path) -> None:
    """After a power cut the process id in it may be anybody's."""
    data = tmp_path / "data"
    with Up(data) as first:
        assert first.ready().end() == 0
    (data / "postgres" / "postmaster.pid").write_text(f"{os.getpid()}\n{data / 'postgres'}\n1\n5432\n")
    with Up(data) as second:
        assert httpx.get(f"{second.ready().said['url']}/readyz").status_code == 200


def test_a_taken_port_moves_on(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with Up(tmp_path / "data", "--port", str(port)) as up:
            assert int(up.ready().said["url"].rsplit(":", 1)[1]) > port
        assert f"port {port} is taken" in (tmp_path / "up.log").read_text()


def test_a_folder_whose_path_is_too_long_for_sockets_works(tmp_path: Path) -> None:
    with Up(tmp_path / ("d" * 60) / ("e" * 60)) as up:
        assert httpx.get(f"{up.ready().said['url']}/readyz").status_code == 200


def test_without_redis_the_worker_looks_by_itself(tmp_path: Path, inputs: Path, write_spec: WriteSpec) -> None:
    from ppo.local.stack import Stack

    said: list[str] = []
    env = {"PPO_TRAINER_COMMAND": TRAINER, "PPO_POLL_S": "1"}
    stack = Stack(tmp_path / "data", port=0, roots=[inputs], use_redis=False, env=env, report=said.append)
    spec = absolute(write_spec(3).read_text(), inputs)
    with stack, Client(stack.url, stack.admin_key) as client:
        assert client.wait(client.submit(spec)["id"], timeout_s=60)["state"] == "succeeded"
        assert any("no Redis" in line for line in said)


def test_servers_that_are_given_are_used(tmp_path: Path, database_url: str, redis_url: str) -> None:
    with Up(tmp_path / "data", DATABASE_URL=database_url, REDIS_URL=redis_url) as up:
        assert httpx.get(f"{up.ready().said['url']}/readyz").json()["ready"] is True
        assert not (tmp_path / "data" / "postgres").exists()


def test_a_database_that_is_away_is_told_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ppo.cli", "up", "--data", str(tmp_path / "data")],
        env={**os.environ, "DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none"}, capture_output=True, text=True,
        check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "the database cannot be used" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_part_that_never_starts_ends_it_with_the_reason(tmp_path: Path) -> None:
    """A worker without its settings, say."""
    with Up(tmp_path / "data", PPO_RENEW_S="100") as up:
        assert up.process.wait(90) == 1
        said = (tmp_path / "up.log").read_text()
        assert "worker did not start" in said
        assert "PPO_RENEW_S" in said
        assert not processes_of(tmp_path / "data")
