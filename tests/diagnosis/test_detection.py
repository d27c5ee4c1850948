"""Faults planted in runs of a platform raise their story first, and healthy runs raise none: hours.

With PPO_DETECTIONS what was told is kept, and what was seen already is not played again (`detection`), so that it may
be broken off: PPO_DETECTIONS=tests/diagnosis/seen.jsonl. `python -m tests.diagnosis.report` makes the tables.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from examples.reviews.prepare import DEFAULT_OUT, prepare
from ppo.spec_file import read_spec_file
from store.states import AT_REST
from tests.diagnosis.detection import (
    FAULTS,
    HEALTHY,
    HEALTHY_ITERATIONS,
    ITERATIONS,
    SEEDS,
    Planted,
    Told,
    keep,
    told_by,
    unseen,
)
from tests.diagnosis.planted_trainer import PREFIX
from tests.ppo_core.diagnostics import planted
from tests.worker.platform import Platform

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(7200)]

REVIEWS = Path(__file__).parents[2] / "examples" / "reviews" / "spec.yaml"
TRAINER = f"{sys.executable} -m tests.diagnosis.planted_trainer"
PATIENCE_S = 7000


@pytest.fixture(scope="module")
def platform(module_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    settings = {"PPO_TRAINER_COMMAND": TRAINER, "OMP_NUM_THREADS": "1", "PPO_CPU_SLOTS": "2", "PPO_LEASE_S": "20"}
    with Platform(module_url, tmp_path_factory.mktemp("data"), settings) as platform:
        platform.start("worker.loop")
        yield platform


def play(platform: Platform, kind: str, specs: dict[int, dict[str, Any]]) -> list[Told]:
    """Runs of one kind, by seed, side by side as far as there is room; what they told."""
    run_ids = {seed: platform.submit_spec(spec) for seed, spec in specs.items()}
    told = []
    for seed, run_id in run_ids.items():
        run = platform.wait_state(run_id, *AT_REST, timeout_s=PATIENCE_S)
        told.append(told_by(kind, seed, run.state, (event for _, event in platform.journal(run_id))))
        keep(told[-1])
    return told


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.fault)
def test_the_right_story_is_the_first_in_four_of_five_seeds(platform: Platform, tmp_path: Path, fault: Planted) -> None:
    def spec(seed: int) -> dict[str, Any]:
        settings = planted.FAULTS[fault.fault].settings
        return planted.keyword_spec(tmp_path / str(seed), seed, ITERATIONS, settings) | {"name": PREFIX + fault.fault}

    told = play(platform, fault.fault, {seed: spec(seed) for seed in unseen(fault.fault)})
    missed = [each for each in told if not each.finds(fault)]
    assert len(missed) <= 1, missed


def healthy_spec(kind: str, seed: int, folder: Path) -> dict[str, Any]:
    if kind == "keyword toy":
        settings = planted.FAULTS["healthy"].settings
        return planted.keyword_spec(folder, seed, HEALTHY_ITERATIONS, settings) | {"name": PREFIX + "healthy"}
    prepare(DEFAULT_OUT, DEFAULT_OUT / "cache", Console(stderr=True))
    head = "separate" if kind.endswith("critic") else "shared"
    changes = [f"iterations={HEALTHY_ITERATIONS}", f"seed={seed}", f"policy.value_head={head}"]
    return read_spec_file(REVIEWS, changes)


@pytest.mark.parametrize("kind", HEALTHY)
def test_healthy_runs_raise_no_story_and_one_alert_at_most(platform: Platform, tmp_path: Path, kind: str) -> None:
    told = play(platform, kind, {seed: healthy_spec(kind, seed, tmp_path / str(seed)) for seed in unseen(kind)})
    assert [each for each in told if (each.state, each.iterations) != ("succeeded", HEALTHY_ITERATIONS)] == []
    assert [each for each in told if each.stories or each.gate_tripped] == []
    judged = 0 if kind == "keyword toy" else HEALTHY_ITERATIONS // 50
    assert {each.gates for each in told} <= {judged}
    assert sum(each.num_bands for each in told) <= len(SEEDS)
