"""A sample of what the scripted trainer does, with the real one on a toy model."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from store.models import Sample
from store.states import TERMINAL
from tests.ppo_core.toy_run import make_toy
from tests.worker.platform import Platform

pytestmark = pytest.mark.stack


@pytest.fixture
def spec(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "toy").mkdir()
    return make_toy(tmp_path / "toy")


@pytest.fixture
def platform(database_url: str, tmp_path: Path) -> Iterator[Platform]:
    settings = {"PPO_TRAINER_COMMAND": "", "OMP_NUM_THREADS": "1"}
    with Platform(database_url, tmp_path, settings) as platform:
        platform.start("worker.loop")
        yield platform


def test_run_reaches_its_goal(platform: Platform, spec: dict[str, Any]) -> None:
    run_id = platform.submit_spec(spec)
    run = platform.wait_state(run_id, *TERMINAL, timeout_s=120)
    assert (run.state, run.iteration) == ("succeeded", 3), platform.logs(run_id)
    assert platform.stored_metrics(run_id) == platform.journal_metrics(run_id) != {}
    with platform.sessions() as session:
        assert session.scalar(select(func.count()).select_from(Sample).where(Sample.run_id == run_id)) > 0
    log = platform.segment(run_id).log(1, 0).read_text()
    assert [log.count(f" INFO iteration {n}: reward/score_mean ") for n in (1, 2, 3)] == [1, 1, 1]


def test_killed_trainer_goes_on_from_its_checkpoint(platform: Platform, spec: dict[str, Any]) -> None:
    run_id = platform.submit_spec({**spec, "iterations": 30})
    platform.wait(run_id, lambda run: run.iteration >= 3, timeout_s=120)
    (started,) = (event for _, event in platform.journal(run_id) if event.type == "started")
    os.kill(started.payload["pid"], signal.SIGKILL)
    run = platform.wait_state(run_id, *TERMINAL, timeout_s=200)
    assert (run.state, run.attempt, run.iteration) == ("succeeded", 2, 30), platform.logs(run_id)
    assert platform.stored_metrics(run_id) == platform.journal_metrics(run_id)


def test_stop_saves(platform: Platform, spec: dict[str, Any]) -> None:
    run_id = platform.submit_spec({**spec, "iterations": 5000, "checkpoints": {"every": 100_000}})
    platform.wait(run_id, lambda run: run.iteration >= 2, timeout_s=120)
    command_id = platform.stop(run_id)
    run = platform.wait_state(run_id, *TERMINAL, timeout_s=40)
    assert (run.state, run.reason_code) == ("stopped", "stopped"), platform.logs(run_id)
    assert platform.command(command_id).status == "done"
    assert len(list(platform.segment(run_id).checkpoints.iterdir())) == 1
