"""Two ranks go on exactly too: killed in an update, and on another number of ranks as near as sums can be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from sqlalchemy.engine import make_url

from ppo_core.checkpoints import SavedTensors
from ppo_core.rundir import SegmentDir
from tests.ppo_core.rank_processes import run_all
from tests.ppo_core.toy_run import toy_segment
from tests.real_postgres import RealPostgres
from tests.worker.exact_runs import HALF, kill_in_update, last_state, metrics_of, samples_of, stateful_spec
from tests.worker.platform import Platform

pytestmark = [pytest.mark.stack, pytest.mark.engines, pytest.mark.timeout(1500)]


@dataclass(frozen=True)
class Runs:
    """Straight on one rank and on two, killed on two, and what goes on from the one on the other."""

    alone: SegmentDir
    straight: SegmentDir
    killed: Path
    from_one: SegmentDir
    to_one: SegmentDir


@pytest.fixture(scope="module", params=[2, pytest.param(1, marks=pytest.mark.slow)], ids="stage-{}".format)
def runs(
    request: pytest.FixtureRequest,
    postgres: RealPostgres,
    _template_url: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("exact-ranks")
    (folder / "toy").mkdir()
    one = stateful_spec(folder / "toy")
    two = {**one, "training": {"engine": "deepspeed", "ranks": 2, "zero_stage": request.param}}
    alone = toy_segment(folder / "alone", one)
    straight = toy_segment(folder / "straight", two)
    from_one = toy_segment(folder / "from-one", two, 2, str(alone.checkpoint(HALF)))
    to_one = toy_segment(folder / "to-one", one, 2, str(straight.checkpoint(HALF)))
    run_all([alone], 1, folder / "alone")
    run_all([straight, from_one], 2, folder / "two")
    run_all([to_one], 1, folder / "one")
    url = postgres.create_database(make_url(_template_url).database)
    with Platform(url, folder, {"PPO_TRAINER_COMMAND": "", "OMP_NUM_THREADS": "1"}) as platform:
        platform.start("worker.loop")
        run_id = platform.submit_spec(two)
        kill_in_update(platform, run_id, HALF + 1)
        run = platform.wait_state(run_id, "succeeded", "failed", timeout_s=400)
        assert (run.state, run.attempt) == ("succeeded", 2), platform.logs(run_id)
        yield Runs(alone, straight, folder / "runs" / run_id, from_one, to_one)
    postgres.drop_database(url)


def test_two_ranks_killed_in_an_update_go_on_as_if_they_had_not_been(runs: Runs) -> None:
    """T22 with all ranks: bit for bit, each rank's file of weights and moments included."""
    straight = runs.straight.path.parent
    assert metrics_of(runs.killed) == metrics_of(straight)
    assert samples_of(runs.killed) == samples_of(straight)
    assert last_state(runs.killed) == last_state(straight)
    assert "state/rank-0001.safetensors" in last_state(straight)["digests"]


@pytest.mark.parametrize("way", ["from_one", "to_one"])
def test_another_number_of_ranks_goes_on_within_a_millionth(runs: Runs, way: str) -> None:
    """The same prompts and responses; weights as a whole within 1e-6 of those of an unchanged number."""
    went_on, straight = (runs.from_one, runs.alone) if way == "from_one" else (runs.to_one, runs.straight)
    ids = [
        [json.loads(line)["tokens"]["ids"] for line in (one.samples / name).read_text().splitlines()]
        for name in (f"iter-{number:06d}-train.jsonl" for number in range(HALF + 1, 2 * HALF + 1))
        for one in (went_on, straight)
    ]
    assert ids[::2] == ids[1::2]
    mine, theirs = (state_of(one.checkpoint(2 * HALF)) for one in (went_on, straight))
    assert mine.keys() == theirs.keys()
    off = distance(mine, theirs)
    print(f"{way}: weights off by {off:.2e} of their norm")
    assert off <= 1e-6


def distance(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Norm of the difference of all weights, by the norm of the weights."""
    names = [name for name in theirs if name.startswith("master/")]
    difference = torch.stack([(mine[name] - theirs[name]).double().norm() for name in names]).norm()
    return float(difference / torch.stack([theirs[name].double().norm() for name in names]).norm())


def state_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    index = json.loads((checkpoint / "state" / "index.json").read_text())["tensors"]
    return dict(SavedTensors(checkpoint / "state", index))
