"""One spec and seed give one set of numbers: in the terminal, under the platform, and stopped and resumed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ppo.client import Client
from ppo.local.compare import compare_metrics, journal_values
from ppo.local.stack import Stack
from ppo_core.rundir import checkpoints, read_manifest, segments
from store.session import make_engine, session_factory
from tests.ppo.local.conftest import wait_for
from tests.ppo_core.toy_run import make_toy

pytestmark = pytest.mark.stack

ITERATIONS = 20  # enough that a stop at the second comes in time
MOODS = ("time", "throughput", "memory", "limit")


def numbers(run_dir: Path) -> dict[tuple[int, str], float | None]:
    """Every metric that does not depend on the machine's mood, by iteration, whichever segment it is in."""
    return {
        (iteration, name): value
        for (_, iteration, name), value in journal_values(run_dir).items()
        if name.split("/")[0] not in MOODS
    }


def weights(run_dir: Path) -> dict[str, str]:
    """Digests of the last policy's files."""
    last = checkpoints(segments(run_dir)[-1])[-1]
    return {name: entry["sha256"] for name, entry in read_manifest(last).items() if name.startswith("policy/")}


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    fields: dict[str, Any] = {**make_toy(folder), "iterations": ITERATIONS}
    (folder / "spec.yaml").write_text(json.dumps(fields))
    return folder / "spec.yaml"


def train(spec: Path, run_dir: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ppo.cli", "train", str(spec), "--run-dir", str(run_dir), *more],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def in_terminal(spec: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("terminal") / "run"
    process = train(spec, run_dir)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return run_dir


def test_the_platform_gives_the_same_numbers_bit_for_bit(spec: Path, in_terminal: Path, tmp_path: Path) -> None:
    with Stack(tmp_path / "data", port=0, roots=[spec.parent]) as stack, Client(stack.url, stack.admin_key) as client:
        run = client.wait(client.submit(spec.read_text())["id"], timeout_s=120)
        run_dir = stack.data / "runs" / run["id"]
        assert run["state"] == "succeeded", run
        assert numbers(run_dir) == numbers(in_terminal)
        assert weights(run_dir) == weights(in_terminal)
        engine = make_engine(stack.database_url or "")
        with session_factory(engine)() as session:
            comparison = compare_metrics(session, run["id"], run_dir)
        engine.dispose()
        assert comparison.equal, str(comparison)
        assert comparison.num_equal > ITERATIONS * 40


def test_stopped_and_resumed_gives_the_same_numbers_bit_for_bit(spec: Path, in_terminal: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = train(spec, run_dir)
    wait_for(lambda: segments(run_dir) != [] and any(i >= 2 for _, i, _ in journal_values(run_dir)), seconds=60)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 3, output
    process = train(spec, run_dir, "--resume")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert numbers(run_dir) == numbers(in_terminal)
    assert weights(run_dir) == weights(in_terminal)
