"""Many runs at once over two workers: every one ends as it has to, and each that waits says why."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select
from starlette.testclient import TestClient

from api.main import create_app
from api.settings import ApiSettings
from store import keys
from store.commands import CommandRefused
from store.models import Worker
from tests.faults.checker import Expected, Rest, violations, watch
from tests.faults.stage import EITHER_TRAINER
from tests.ppo_core.toy_run import make_toy
from tests.worker.platform import Platform, wait_until

pytestmark = pytest.mark.stack

AT_ONCE = 8  # as many as two workers take
FAILED = Expected("failed", "first_minibatch_ratio")


@pytest.fixture
def platform(database_url: str, tmp_path: Path) -> Iterator[Platform]:
    with Platform(database_url, tmp_path, {"PPO_CPU_SLOTS": "4", "PPO_LEASE_S": "20"}) as platform:
        yield platform


def start_two_workers(platform: Platform) -> None:
    for name in ("one", "two"):
        platform.start("worker.loop", PPO_WORKER_ID=name)

    def both() -> bool:
        with platform.sessions() as session:
            return session.scalar(select(func.count()).select_from(Worker)) == 2

    wait_until(both, 60)


def queued_over_rest(platform: Platform) -> list[dict[str, Any]]:
    """What a user sees of the queue."""
    with platform.sessions.begin() as session:
        key = keys.create_key(session, "v", "viewer")[1]
    app = create_app(ApiSettings(DATABASE_URL=platform.database_url, REDIS_URL=None, data_dir=platform.data))
    with TestClient(app, base_url="http://127.0.0.1", headers={"Authorization": f"Bearer {key}"}) as client:
        items: list[dict[str, Any]] = client.get("/v1/runs", params={"state": "queued", "limit": 200}).json()["items"]
        return items


def submit_and_look(platform: Platform, num: int, real: int) -> dict[str, Expected]:
    """Queue `num` runs, `real` of them with the real trainer, while both workers are kept from taking any."""
    platform.settings["PPO_TRAINER_COMMAND"] = EITHER_TRAINER
    start_two_workers(platform)
    for worker in platform.processes:
        os.kill(worker.pid, signal.SIGSTOP)
    expected: dict[str, Expected] = {}
    toy: dict[str, Any] = {}
    if real:
        (platform.data / "toy").mkdir()
        toy = make_toy(platform.data / "toy")
    for number in range(num):
        if number % 10 == 9:
            expected[platform.submit(3, iteration_s=0.01, end_at=[2, 70])] = FAILED
        elif number % 10 == 4 and number // 10 < real:
            expected[platform.submit_spec(toy)] = Expected()
        else:
            expected[platform.submit(3, iteration_s=0.01)] = Expected()
    waiting = queued_over_rest(platform)
    for worker in platform.processes:
        os.kill(worker.pid, signal.SIGCONT)
    places = [item["waiting_reason"].split(";")[0].rstrip(".") for item in reversed(waiting)]
    assert places == ["Next in the queue", *(f"{ahead} in the queue before it" for ahead in range(1, num))]
    return expected


def check_all(platform: Platform, expected: dict[str, Expected], within_s: float) -> None:
    seen = watch(platform, dict.fromkeys(expected, time.monotonic() + within_s))
    found = {run_id: violations(platform, seen[run_id], each) for run_id, each in expected.items()}
    assert {run_id: sentences for run_id, sentences in found.items() if sentences} == {}
    assert platform.busy_slots() == 0


def test_runs_over_two_workers_end_as_expected(platform: Platform) -> None:
    check_all(platform, submit_and_look(platform, 24, real=0), 120)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_runs_over_two_workers_end_as_expected(platform: Platform) -> None:
    """Ten of them train for real."""
    expected = submit_and_look(platform, 200, real=10)
    check_all(platform, expected, 1500)
    real = [run_id for run_id in expected if "scripted" not in platform.run(run_id).spec]
    assert len(real) == 10
    for run_id in real:
        steps = [
            event.payload["optimizer/steps"]
            for _, event in platform.journal(run_id)
            if event.type == "metrics" and "optimizer/steps" in event.payload
        ]
        assert sum(steps) >= 3


def race_stops_and_ends(platform: Platform, num: int) -> set[str]:
    """P11: a stop at a random moment from the submit to one and a half times the run's duration. Returns the ends."""
    start_two_workers(platform)
    begun = time.monotonic()
    check_all(platform, {platform.submit(1, iteration_s=0.05): Expected() for _ in range(AT_ONCE)}, 60)
    took_s = time.monotonic() - begun
    chance = random.Random(num)
    expected: dict[str, Expected] = {}
    for _ in range(0, num, AT_ONCE):
        now = time.monotonic()
        stops = sorted(
            (now + chance.uniform(0, 1.5 * took_s), platform.submit(1, iteration_s=0.05)) for _ in range(AT_ONCE)
        )
        refused = set()
        for at, run_id in stops:
            time.sleep(max(0.0, at - time.monotonic()))
            try:
                platform.stop(run_id)
            except CommandRefused:
                refused.add(run_id)
        for run_id, seen in watch(platform, {run_id: time.monotonic() + 60 for _, run_id in stops}).items():
            assert isinstance(seen, Rest), f"{seen.state} {seen.reason_code}"
            stopped = seen.run.state == "stopped"
            # A stop that was refused came too late; one that was taken may still have come too late.
            assert not (stopped and run_id in refused)
            expected[run_id] = Expected("stopped", "stopped", attempts=(0, 1)) if stopped else Expected()
    check_all(platform, expected, 5)  # long after: no end was changed by what came later
    return {each.state for each in expected.values()}


def test_stops_that_cross_an_end(platform: Platform) -> None:
    assert "stopped" in race_stops_and_ends(platform, 20)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_stops_that_cross_an_end(platform: Platform) -> None:
    assert race_stops_and_ends(platform, 200) == {"stopped", "succeeded"}
