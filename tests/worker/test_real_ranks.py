"""A sample of what the scripted ranks do, with two real ones of a DeepSpeed run: killed, and stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import select

from store.models import RunEvent
from tests.ppo_core.toy_run import make_toy
from tests.worker.platform import Platform, alive
from worker.processes import marked_processes

pytestmark = [pytest.mark.stack, pytest.mark.engines]

OUTCOME_S = 30.0


@pytest.fixture
def spec(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "toy").mkdir()
    training = {"engine": "deepspeed", "ranks": 2, "zero_stage": 2, "peer_timeout_s": 12}
    return {**make_toy(tmp_path / "toy"), "training": training, "iterations": 5000, "checkpoints": {"every": 2}}


@pytest.fixture
def platform(database_url: str, tmp_path: Path) -> Iterator[Platform]:
    settings = {"PPO_TRAINER_COMMAND": "", "OMP_NUM_THREADS": "1"}
    with Platform(database_url, tmp_path, settings) as platform:
        platform.start("worker.loop")
        yield platform


def ranks_of(supervisor: int) -> list[int]:
    """Process numbers of the present attempt, by rank."""
    found = psutil.Process(supervisor).children()
    return [process.pid for process in sorted(found, key=lambda each: int(each.environ()["RANK"]))]


@pytest.mark.parametrize(
    ("signum", "words"),
    [
        (signal.SIGKILL, "rank 1: signal 9; rank 0: "),
        (signal.SIGSTOP, "rank 0: exit code 1; rank 1: signal 9, ended while it stood stopped"),
    ],
    ids=["killed", "stopped"],
)
def test_a_lost_rank_is_named_within_its_deadline_and_nothing_of_it_is_left(
    platform: Platform, spec: dict[str, Any], signum: signal.Signals, words: str
) -> None:
    run_id = platform.submit_spec(spec)
    platform.wait(run_id, lambda run: run.iteration >= 1, timeout_s=240)
    supervisor = platform.supervisor_pid(run_id)
    pids = ranks_of(supervisor)
    assert len(pids) == 2
    os.kill(pids[1], signum)
    platform.wait(run_id, lambda run: run.infrastructure_failures == 1, timeout_s=OUTCOME_S)
    assert not any(alive(pid) for pid in pids)
    left = {process.pid for process in marked_processes(run_id, 1)}
    assert left <= {supervisor}  # it is just leaving
    statement = select(RunEvent.payload).where(RunEvent.run_id == run_id, RunEvent.type == "state")
    with platform.sessions() as session:
        (detail,) = [move["reason_detail"] for move in session.scalars(statement) if move["to"] == "recovering"]
    assert words in detail
