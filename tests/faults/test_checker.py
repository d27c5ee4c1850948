"""The checker finds nothing where there is nothing, and finds each of three planted faults of the platform."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from store import workers
from store.queue import claim
from store.runs import transition
from tests.faults.checker import Expected, violations, watch
from tests.worker.platform import Platform, wait_until
from worker.processes import marks

pytestmark = pytest.mark.stack


@pytest.fixture
def platform(database_url: str, tmp_path: Path) -> Iterator[Platform]:
    with Platform(database_url, tmp_path) as platform:
        with platform.sessions.begin() as session:
            workers.register(
                session, worker_id="here", host="h", pid=1, cpu_slots=1, gpus=0, version="0", data_token="t"
            )
        yield platform


def start(platform: Platform, planted: str) -> subprocess.Popen[bytes]:
    """Claim the run that is queued, and start a supervisor with this fault for it."""
    with platform.sessions.begin() as session:
        claimed = claim(session, "here", 20)
        assert claimed is not None
    words = [sys.executable, "-m", "tests.faults.planted", planted, claimed.run_id, str(claimed.token)]
    with (platform.data / "supervisor.log").open("ab") as output:
        environment = platform.environment(**marks(claimed.run_id, claimed.token))
        process = subprocess.Popen(words, env=environment, stdout=output, stderr=output, start_new_session=True)
    platform.processes.append(process)
    return process


def found(platform: Platform, run_id: str, expected: Expected | None = None) -> list[str]:
    seen = watch(platform, {run_id: time.monotonic() + 60})[run_id]
    return violations(platform, seen, expected or Expected())


def test_a_good_supervisor_leaves_nothing_to_find(platform: Platform) -> None:
    run_id = platform.submit(6, children=3)
    start(platform, "none")
    assert found(platform, run_id) == [], platform.logs(run_id)


def test_an_outcome_before_the_processes_are_gone_is_found(platform: Platform) -> None:
    run_id = platform.submit(3, children=3)
    start(platform, "speak_too_early")
    sentences = found(platform, run_id)
    assert any("were still there when it was succeeded" in sentence for sentence in sentences), sentences
    assert any("are left" in sentence for sentence in sentences), sentences


def test_a_batch_that_was_not_stored_is_found(platform: Platform) -> None:
    run_id = platform.submit(12, iteration_s=0.1)
    start(platform, "drop_a_batch")
    sentences = found(platform, run_id)
    assert any("metric points were lost" in sentence for sentence in sentences), sentences
    assert any("too often or not at all" in sentence for sentence in sentences), sentences


def test_two_attempts_at_once_are_found(platform: Platform) -> None:
    """The first one is declared lost, keeps on, and the second does not look for it."""
    run_id = platform.submit(8, iteration_s=0.1, hold=["iteration", 4])
    start(platform, "ignore_the_fence")
    wait_until(lambda: platform.held(run_id), 60)
    with platform.sessions.begin() as session:
        transition(session, run_id, "recovering")
        transition(session, run_id, "queued")
    start(platform, "ignore_the_fence")
    wait_until(lambda: platform.run(run_id).state == "running", 60)
    platform.release(run_id)
    sentences = found(platform, run_id, Expected(attempts=(2,)))
    assert any("beside" in sentence for sentence in sentences), sentences
