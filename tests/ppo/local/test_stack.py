"""The whole stack, and the command line against it. The trainer is scripted, all else is real."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from ppo.client import Client
from ppo.local.compare import compare_metrics
from ppo.local.demo import demo
from ppo.local.processes import StackError
from ppo.local.stack import Stack
from store.session import make_engine, session_factory
from tests.ppo.local.conftest import TRAINER, ppo, wait_for

pytestmark = pytest.mark.stack

# So long that a run that starts soon was started by a hint.
POLL_S = 30

WriteSpec = Callable[..., Path]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, inputs: Path) -> Iterator[Stack]:
    env = {"PPO_TRAINER_COMMAND": TRAINER, "PPO_POLL_S": str(POLL_S), "PPO_CPU_SLOTS": "4"}
    with Stack(tmp_path_factory.mktemp("stack") / "data", port=0, roots=[inputs], env=env) as stack:
        yield stack


@pytest.fixture(scope="module")
def access(stack: Stack) -> dict[str, str]:
    return {"PPO_HOME": str(stack.data), "PPO_URL": "", "PPO_KEY": ""}


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[Client]:
    with Client(stack.url, stack.admin_key) as client:
        yield client


def test_the_key_file_is_for_its_owner_alone(stack: Stack) -> None:
    path = stack.data / "client.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert json.loads(path.read_text()) == {"url": stack.url, "key": stack.admin_key}


def test_it_listens_on_loopback_alone(stack: Stack) -> None:
    port = int(stack.url.rsplit(":", 1)[1])
    listening = subprocess.run(["ss", "-Hltn"], capture_output=True, text=True, check=True).stdout
    addresses = [line.split()[3] for line in listening.splitlines() if line.split()[3].endswith(f":{port}")]
    assert addresses == [f"127.0.0.1:{port}"]


def test_a_login_link_signs_in_once(stack: Stack) -> None:
    link = stack.login_link()
    token = re.fullmatch(rf"{re.escape(stack.url)}/login#token=(\S+)", link)[1]  # type: ignore[index]
    login = [httpx.post(f"{stack.url}/v1/auth/login", json={"token": token}) for _ in range(2)]
    assert login[0].status_code == 200
    assert login[0].json()["role"] == "admin"
    assert login[1].status_code == 401


def test_a_second_platform_on_the_folder_is_refused_and_touches_no_run(
    stack: Stack, client: Client, access: dict[str, str], write_spec: WriteSpec
) -> None:
    run = json.loads(ppo("submit", write_spec(100_000), "--json", env=access).stdout)
    wait_for(lambda: client.run(run["id"])["iteration"] > 1)
    supervisors = [process.pid for process in stack._ours("worker.supervise")]
    assert supervisors
    said: list[str] = []
    second = Stack(stack.data, port=0, report=said.append)
    with pytest.raises(StackError, match="a platform already runs on"), second:
        pass
    second.stop()
    assert said == []
    assert [process.pid for process in stack._ours("worker.supervise")] == supervisors
    reached = client.run(run["id"])["iteration"]
    wait_for(lambda: client.run(run["id"])["iteration"] > reached)
    assert client.run(run["id"])["attempt"] == 1
    assert ppo("stop", run["id"], "--wait", env=access).returncode == 3


def test_no_secret_is_on_a_command_line_or_in_a_log(stack: Stack) -> None:
    shown = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    logs = "".join(path.read_text(errors="replace") for path in (stack.data / "logs").iterdir())
    assert stack.admin_key not in shown + logs


def test_submit_and_wait_leave_with_0_when_the_run_succeeded(
    access: dict[str, str], client: Client, stack: Stack, write_spec: WriteSpec
) -> None:
    began = time.monotonic()
    done = ppo("submit", write_spec(5), "--wait", env=access)
    assert done.returncode == 0, done.stderr
    assert "iteration 5/5" in done.stdout
    assert f"{stack.url}/runs/r-" in done.stdout
    assert time.monotonic() - began < POLL_S / 2, "no hint arrived"


def test_postgres_holds_what_the_journal_says(access: dict[str, str], stack: Stack, write_spec: WriteSpec) -> None:
    run = json.loads(ppo("submit", write_spec(7, nan_at=3), "--wait", "--json", env=access).stdout)
    assert run["state"] == "succeeded"
    engine = make_engine(stack.database_url or "")
    with session_factory(engine)() as session:
        comparison = compare_metrics(session, run["id"], stack.data / "runs" / run["id"])
    engine.dispose()
    assert comparison.equal, str(comparison)
    assert comparison.num_equal == 7 * 6


@pytest.mark.parametrize(("end", "state", "code"), [(70, "failed", 1), (69, "stopped", 4), (10, "paused", 4)])
def test_exit_codes_of_runs_that_end_otherwise(
    access: dict[str, str], write_spec: WriteSpec, end: int, state: str, code: int
) -> None:
    done = ppo("submit", write_spec(5, end_at=[2, end]), "--wait", "--json", env=access)
    assert json.loads(done.stdout)["state"] == state
    assert done.returncode == code


def test_a_stopped_run_leaves_with_3(access: dict[str, str], client: Client, write_spec: WriteSpec) -> None:
    spec = write_spec(100_000, checkpoint_every=100_000)
    run = json.loads(ppo("submit", spec, "--json", env=access).stdout)
    wait_for(lambda: client.run(run["id"])["iteration"] > 1)
    stopped = ppo("stop", run["id"], "--wait", env=access)
    assert stopped.returncode == 3, stopped.stdout + stopped.stderr
    assert ppo("wait", run["id"], env=access).returncode == 3
    assert ppo("watch", run["id"], env=access).returncode == 3
    for _ in range(2):
        again = ppo("stop", run["id"], env=access)
        assert again.returncode == 0, "it does stand still"
        assert "has already stopped at iteration" in again.stdout
    assert json.loads(ppo("stop", run["id"], "--json", env=access).stdout)["state"] == "stopped"
    assert ppo("stop", run["id"], "--wait", env=access).returncode == 3
    assert [checkpoint["reason"] for checkpoint in client.checkpoints(run["id"])] == ["stop"]


def test_wait_gives_up_with_5_and_the_run_goes_on(
    access: dict[str, str], client: Client, write_spec: WriteSpec
) -> None:
    run = json.loads(ppo("submit", write_spec(100_000), "--json", env=access).stdout)
    done = ppo("wait", run["id"], "--timeout", "0.5", env=access)
    assert done.returncode == 5
    wait_for(lambda: client.run(run["id"])["state"] == "running")
    client.stop(run["id"])


def test_ctrl_c_detaches_and_never_stops_a_run(access: dict[str, str], client: Client, write_spec: WriteSpec) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "ppo.cli", "submit", str(write_spec(100_000)), "--wait"], env={**os.environ, **access},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # Tests that a shell started in the background ignore SIGINT, and so would every process of theirs.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stdout is not None
    run_id = process.stdout.readline().split()[0]
    wait_for(lambda: client.run(run_id)["iteration"] > 1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert f"ppo watch {run_id}" in errors
    assert client.run(run_id)["state"] == "running"
    client.stop(run_id)


def test_a_bad_spec_leaves_with_2_and_queues_nothing(
    access: dict[str, str], client: Client, write_spec: WriteSpec
) -> None:
    before = len(list(client.runs()))
    done = ppo("submit", write_spec(5), "--set", "kl.coef=-1", "--set", "policy.model=missing", env=access)
    assert done.returncode == 2
    assert "  /kl/coef: " in done.stderr
    done = ppo("submit", write_spec(5), "--set", "policy.model=missing", "--json", env=access)
    assert [fault["pointer"] for fault in json.loads(done.stdout)["error"]["errors"]] == ["/policy/model"]
    assert len(list(client.runs())) == before


def test_a_dry_run_queues_nothing(access: dict[str, str], client: Client, write_spec: WriteSpec) -> None:
    before = len(list(client.runs()))
    done = ppo("submit", write_spec(5), "--dry-run", env=access)
    assert done.returncode == 0, done.stderr
    assert "nothing was queued" in done.stdout
    assert len(list(client.runs())) == before


def test_ls_and_get_show_runs(access: dict[str, str], write_spec: WriteSpec) -> None:
    run = json.loads(ppo("submit", write_spec(3), "--wait", "--json", env=access).stdout)
    assert run["id"] in ppo("ls", env=access).stdout
    assert run["id"] in [row["id"] for row in json.loads(ppo("ls", "--json", "--limit", "3", env=access).stdout)]
    shown = ppo("get", run["id"], env=access)
    assert "succeeded" in shown.stdout
    assert "reward/score_mean" in shown.stdout
    lines = ppo("ls", env={**access, "COLUMNS": "40"}).stdout.splitlines()
    row = next(line.split("\t") for line in lines if line.startswith(run["id"]))
    assert (row[1], *row[2:6], row[8]) == (run["name"], "succeeded", "goal", "ok", "3/3", run["created_at"])
    assert all(line.count("\t") == 8 for line in lines)
    unknown = ppo("get", "r-nosuchrun", env=access)
    assert unknown.returncode == 2
    assert unknown.stderr == "error: There is no run 'r-nosuchrun'. See `ppo ls`.\n"


def test_a_reader_that_leaves_ends_a_command_quietly(access: dict[str, str], write_spec: WriteSpec) -> None:
    run = json.loads(ppo("submit", write_spec(3), "--wait", "--json", env=access).stdout)
    for words in (["ls"], ["watch", run["id"]], ["wait", run["id"], "--json"], ["get", run["id"]], ["--help"]):
        gone, ours = os.pipe()
        os.close(gone)
        done = subprocess.run(
            [sys.executable, "-m", "ppo.cli", *words], env={**os.environ, **access}, stdout=ours,
            stderr=subprocess.PIPE, text=True, check=False, timeout=60,
        )  # fmt: skip
        os.close(ours)
        assert (done.returncode, done.stderr) == (141, ""), words


def test_what_is_no_spec_needs_no_platform(access: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text("# later\n")
    done = ppo("submit", tmp_path / "spec.yaml", env={**access, "PPO_HOME": str(tmp_path)})
    assert done.returncode == 2
    assert done.stderr.startswith("error: the spec is empty; ")


def test_watch_as_json_is_one_event_a_line_live_and_afterwards(access: dict[str, str], write_spec: WriteSpec) -> None:
    run = json.loads(ppo("submit", write_spec(3), "--json", env=access).stdout)
    live, afterwards = (ppo("watch", run["id"], "--json", env=access) for _ in range(2))
    assert live.returncode == afterwards.returncode == 0
    events = [json.loads(line) for line in live.stdout.splitlines()]
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert [event["iteration"] for event in events if event["type"] == "metrics"] == [1, 2, 3]
    assert afterwards.stdout.startswith(live.stdout)


def test_a_wrong_key_leaves_with_6(access: dict[str, str], stack: Stack) -> None:
    done = ppo("ls", env={**access, "PPO_URL": stack.url, "PPO_KEY": "ppo_wrong"})
    assert done.returncode == 6
    assert "PPO_KEY" in done.stderr


def test_no_platform_leaves_with_7(access: dict[str, str], stack: Stack, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert ppo("ls", env={**access, "PPO_URL": url, "PPO_KEY": stack.admin_key}).returncode == 7
    done = ppo("ls", env={**access, "PPO_HOME": str(tmp_path)})
    assert done.returncode == 7
    assert "ppo up" in done.stderr


def test_the_demo_ends_with_the_run_and_a_comparison(
    stack: Stack, write_spec: WriteSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo(stack, write_spec(4), [], stay=False) == 0
    printed = capsys.readouterr().out
    assert f"{stack.url}/login#token=" in printed
    assert f"all {4 * 6} metric values of the journal are in Postgres, and no others" in printed
    assert demo(stack, write_spec(4, end_at=[2, 70]), [], stay=False) == 1


def _is_ready(stack: Stack) -> bool:
    try:
        checks = httpx.get(f"{stack.url}/readyz").json()["checks"]
    except httpx.TransportError:  # an api that was just started does not listen yet
        return False
    return bool(checks == {"database": "ok", "broker": "ok"})


@pytest.mark.parametrize("name", ["api", "worker", "reconciler", "redis", "postgres"])
def test_a_part_that_dies_is_started_again_and_runs_go_on(
    access: dict[str, str], client: Client, stack: Stack, write_spec: WriteSpec, name: str
) -> None:
    server = {"redis": stack.redis, "postgres": stack.postgres}.get(name)
    child = server.child if server is not None else getattr(stack, name)
    before = child.pid
    os.kill(before, signal.SIGKILL)
    wait_for(lambda: child.alive and child.pid != before, seconds=60)
    wait_for(lambda: _is_ready(stack), seconds=60)
    done = ppo("submit", write_spec(3), "--wait", "--json", env=access)
    assert done.returncode == 0, done.stdout + done.stderr
