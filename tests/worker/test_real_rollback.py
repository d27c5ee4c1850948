"""A roll back with the real trainer: unchanged it repeats the abandoned segment bit for bit, in a new order not."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ppo_core.spec import parse_spec
from tests.ppo_core.toy_run import make_toy
from tests.worker.going_back import checkpoint, go_back
from tests.worker.platform import Platform, wait_until

pytestmark = pytest.mark.stack

# What a clock or the machine decides.
MEASURED = ("time/", "throughput/", "memory/", "limit/")


@pytest.fixture
def platform(database_url: str, tmp_path: Path) -> Iterator[Platform]:
    settings = {"PPO_TRAINER_COMMAND": "", "OMP_NUM_THREADS": "1"}
    with Platform(database_url, tmp_path, settings) as platform:
        platform.start("worker.loop")
        platform.start("worker.reconcile")
        yield platform


def _numbers(platform: Platform, run_id: str, segment: int) -> dict[tuple[int, str], str]:
    return {
        (iteration, name): value
        for (number, iteration, name), value in platform.journal_metrics(run_id).items()
        if number == segment and iteration > 1 and not name.startswith(MEASURED)
    }


def _state(platform: Platform, run_id: str, segment: int) -> dict[str, str]:
    """Digests of the weights and moments of the last checkpoint, and of the samples of iterations 2 and 3."""
    folder = platform.segment(run_id, segment)
    last = folder.checkpoint(3)
    files = [*last.rglob("*.safetensors"), *folder.samples.glob("iter-00000[23]-train.jsonl")]
    return {path.relative_to(folder.path).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_same_again_or_another_order(platform: Platform, tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    toy = make_toy(tmp_path / "toy")
    spec: dict[str, Any] = parse_spec({**toy, "checkpoints": {"every": 1, "keep_last": -1}}).model_dump(mode="json")
    run_id = platform.submit_spec(spec)
    platform.wait_state(run_id, "succeeded", timeout_s=200)
    target = checkpoint(platform, run_id, 1)
    for segment, changes in ((2, {}), (3, {"data": {**spec["data"], "seed": 77}})):
        command = go_back(platform, run_id, target, **changes)
        wait_until(lambda command=command: platform.command(command).status == "done", 60)  # type: ignore[misc]
        run = platform.wait(
            run_id, lambda run, segment=segment: run.state == "succeeded" and run.active_segment == segment, 200
        )
        assert run.iteration == 3
    first, same, other = (_numbers(platform, run_id, segment) for segment in (1, 2, 3))
    assert same == first != {}
    assert {iteration for iteration, _ in same} == {2, 3}
    assert _state(platform, run_id, 2) == _state(platform, run_id, 1)
    assert other.keys() == first.keys()
    assert other != first
    assert _state(platform, run_id, 3) != _state(platform, run_id, 1)
