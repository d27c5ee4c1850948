"""2N iterations straight are N, a kill in the update of the next one, and N in a new process: bit for bit.

The interrupted runs go through the worker, the others through the trainer's entry point, as `ppo train` starts it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.engine import make_url

from ppo_core.rundir import checkpoint_iteration, checkpoints, segments
from tests.ppo_core.rank_processes import PROGRAM, exit_codes, start_ranks
from tests.ppo_core.toy_run import toy_segment
from tests.real_postgres import RealPostgres
from tests.worker.exact_runs import (
    HALF,
    kill_in_update,
    last_state,
    lose_machine_in_update,
    metrics_of,
    samples_of,
    state_of,
    stateful_spec,
)
from tests.worker.platform import Platform

# Five trainers are started one after the other, and two of them beside a process that runs five segments.
pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]

VARIANTS: dict[str, dict[str, Any]] = {
    "adapters": {"policy": {"lora": {"rank": 2, "alpha": 4}}},
    # The critic's warm-up is not over at the checkpoint.
    "critic": {
        "policy": {"value_head": "separate"},
        "update": {"pack_rows": True, "token_budget": 100, "critic_warmup_iterations": HALF + 1},
    },
}
# The last one: its worker is gone afterwards, and the run goes on with another.
LOSES_ITS_MACHINE = "critic"


@dataclass(frozen=True)
class Runs:
    """Run folders by variant."""

    straight: dict[str, Path]
    killed: dict[str, Path]
    rolled_back: dict[str, Path]
    reseeded: Path


def merged(spec: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    return {**spec, **{name: {**spec[name], **part} for name, part in change.items()}}


@pytest.fixture(scope="module")
def runs(postgres: RealPostgres, _template_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("exact")
    (folder / "toy").mkdir()
    base = stateful_spec(folder / "toy")
    specs = {name: merged(base, change) for name, change in VARIANTS.items()}
    straight = {name: toy_segment(folder / f"straight-{name}", spec) for name, spec in specs.items()}
    back = {
        name: toy_segment(folder / f"back-{name}", spec, 2, str(straight[name].checkpoint(HALF)))
        for name, spec in specs.items()
    }
    start = str(straight["adapters"].checkpoint(HALF))
    reseeded = toy_segment(folder / "reseeded", merged(specs["adapters"], {"data": {"seed": 2}}), 2, start)
    words = [str(PROGRAM), *(str(one.path) for one in (*straight.values(), *back.values(), reseeded))]
    url = postgres.create_database(make_url(_template_url).database)
    settings = {"PPO_TRAINER_COMMAND": "", "OMP_NUM_THREADS": "1"}
    with Platform(url, folder, settings) as platform:
        platform.start("worker.loop")
        alone = start_ranks(1, *words, log=folder / "alone")
        killed = {}
        for name, spec in specs.items():
            run_id = platform.submit_spec(spec)
            if name == LOSES_ITS_MACHINE:
                lose_machine_in_update(platform, run_id, HALF + 1)
                platform.start("worker.loop", PPO_WORKER_ID="there")
                platform.start("worker.reconcile")
            else:
                kill_in_update(platform, run_id, HALF + 1)
            run = platform.wait_state(run_id, "succeeded", "failed", timeout_s=240)
            assert (run.state, run.attempt, run.infrastructure_failures) == ("succeeded", 2, 1), platform.logs(run_id)
            assert platform.stored_metrics(run_id) == platform.journal_metrics(run_id)
            killed[name] = folder / "runs" / run_id
        assert exit_codes(alone, 240) == [0], (folder / "alone-0.log").read_text()[-3000:]
        yield Runs(
            {name: segment.path.parent for name, segment in straight.items()},
            killed,
            {name: segment.path.parent for name, segment in back.items()},
            reseeded.path.parent,
        )
    postgres.drop_database(url)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_killed_in_an_update_goes_on_as_if_it_had_not_been(runs: Runs, variant: str) -> None:
    """T22, T23 and T25: weights, value head or critic, moments, schedule, responses, prompt order and all metrics.

    One lost its trainer, the other its whole machine.
    """
    straight, killed = runs.straight[variant], runs.killed[variant]
    assert metrics_of(killed) == metrics_of(straight)
    assert set(metrics_of(straight)) == set(range(2 * HALF + 1))
    assert samples_of(killed) == samples_of(straight)
    assert last_state(killed) == last_state(straight)
    digests = last_state(straight)["digests"]
    assert {"policy/model.safetensors", "state/rank-0000.safetensors"} <= digests.keys()


def test_all_that_has_a_state_was_in_play(runs: Runs) -> None:
    """Else the comparison would show nothing: each of them moved before the checkpoint, and after it."""
    metrics = metrics_of(runs.straight["adapters"])
    half, whole = (state_of(path)["trainer"] for path in checkpoints_of(runs.straight["adapters"]).values())
    for name in ("kl_coef", "score_moments", "cursor", "optimizer_steps"):
        assert half[name] != whole[name], name
    assert half["gate"] is not None
    assert half["kl_coef"] != 0.1
    assert half["score_moments"]["count"] == HALF * 8
    rates = [metrics[number]["optimizer/learning_rate"] for number in (1, HALF, HALF + 1, 2 * HALF)]
    assert len(set(rates)) == len(rates)
    warming = metrics_of(runs.straight["critic"])
    assert [warming[number]["policy/grad_norm"] > 0 for number in range(1, 2 * HALF + 1)] == [False] * 4 + [True] * 2
    lengths = [metrics[number]["response/length_mean"] for number in range(1, 2 * HALF + 1)]
    assert len(set(lengths)) > 1


def checkpoints_of(run_dir: Path) -> dict[int, Path]:
    return {checkpoint_iteration(path) or 0: path for path in checkpoints(segments(run_dir)[-1])}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_roll_back_with_nothing_changed_repeats_the_abandoned_iterations(runs: Runs, variant: str) -> None:
    straight, back = runs.straight[variant], runs.rolled_back[variant]
    later = {number: values for number, values in metrics_of(straight).items() if number > HALF}
    assert metrics_of(back) == later
    mine, theirs = samples_of(back), samples_of(straight)
    assert mine == {name: theirs[name] for name in mine}
    assert sum(name.endswith("train.jsonl") for name in mine) == HALF
    assert last_state(back) == last_state(straight)


def test_a_roll_back_with_another_data_seed_does_not(runs: Runs) -> None:
    straight, reseeded = samples_of(runs.straight["adapters"]), samples_of(runs.reseeded)
    for number in range(HALF + 1, 2 * HALF + 1):
        name = f"iter-{number:06d}-train.jsonl"
        assert reseeded[name] != straight[name]
    assert last_state(runs.reseeded)["digests"] != last_state(runs.straight["adapters"])["digests"]
    assert last_state(runs.reseeded)["random"]["data_seed"] == 2
