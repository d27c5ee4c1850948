"""Two ranks of the real trainer under the platform: one is killed, one is stopped inside a collective."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from store.models import RunEvent
from store.states import TERMINAL
from tests.ppo_core.toy_run import make_toy
from tests.worker.platform import Platform
from worker.processes import marked_processes

pytestmark = [pytest.mark.stack, pytest.mark.engines]

PEER_TIMEOUT_S = 8
DEADLINE_S = 30  # from the fault to a run that is back in the queue, with every process of the attempt gone


@pytest.fixture
def spec(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "toy").mkdir()
    training = {"engine": "deepspeed", "ranks": 2, "zero_stage": 2, "peer_timeout_s": PEER_TIMEOUT_S}
    return {**make_toy(tmp_path / "toy"), "iterations": 12, "training": training}


@pytest.fixture
def platform(database_url: str, tmp_path: Path) -> Iterator[Platform]:
    settings = {"PPO_TRAINER_COMMAND": "", "OMP_NUM_THREADS": "1"}
    with Platform(database_url, tmp_path, settings) as platform:
        platform.start("worker.loop")
        yield platform


@pytest.mark.parametrize(("rank", "number"), [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_run_that_lost_a_rank_goes_on_from_its_checkpoint(
    platform: Platform, spec: dict[str, Any], rank: int, number: signal.Signals
) -> None:
    run_id = platform.submit_spec(spec)
    run = platform.wait(run_id, lambda run: run.iteration >= 3, timeout_s=120)
    token = run.lease_token
    os.kill(platform.trainer_pid(run_id, rank), number)
    platform.wait(run_id, lambda run: run.lease_token > token, timeout_s=DEADLINE_S)
    assert not marked_processes(run_id, token)
    with platform.sessions() as session:
        moves = session.scalars(select(RunEvent.payload).where(RunEvent.run_id == run_id, RunEvent.type == "state"))
        (detail,) = [str(move["reason_detail"]) for move in moves if move["to"] == "recovering"]
    assert f"rank {rank}: signal 9" in detail
    run = platform.wait_state(run_id, *TERMINAL, timeout_s=180)
    assert (run.state, run.iteration) == ("succeeded", 12), platform.logs(run_id)
    assert platform.stored_metrics(run_id) == platform.journal_metrics(run_id)
