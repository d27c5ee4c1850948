"""Two ranks under DeepSpeed train what one process does: real process groups, real runs, every stage of ZeRO."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ppo_core.checkpoints import SavedTensors
from ppo_core.rundir import SegmentDir, checkpoints
from tests.ppo_core.rank_processes import run_all
from tests.ppo_core.toy_run import journal, make_toy, timeless, toy_segment

# The first test waits for all runs: nearly two minutes where nothing else runs.
pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

ITERATIONS = 3
STAGES = (0, 1, 2, 3)
# What differs from the plain run, and the stages at which it is tried.
VARIANTS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "plain": ({}, STAGES),
    "separate": ({"policy": {"value_head": "separate"}, "update": {"critic_warmup_iterations": 1}}, STAGES),
    "adapters": (
        {"policy": {"lora": {"rank": 2, "alpha": 4}}, "update": {"critic_warmup_iterations": 1, "entropy_coef": 0.01}},
        (3,),
    ),
}
CASES = [(variant, stage) for variant, (_, stages) in VARIANTS.items() for stage in stages]
NEAR = 1e-5


def merged(spec: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    return {
        **spec,
        **{key: {**spec.get(key, {}), **part} if isinstance(part, dict) else part for key, part in change.items()},
    }


def deepspeed(stage: int, **more: Any) -> dict[str, Any]:
    return {"engine": "deepspeed", "ranks": 2, "zero_stage": stage, **more}


def state_of(folder: Path) -> dict[str, Tensor]:
    index = json.loads((folder / "state" / "index.json").read_text())["tensors"]
    return dict(SavedTensors(folder / "state", index))


def metrics_of(segment: SegmentDir) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for event in journal(segment, "metrics"):
        found.setdefault(event.iteration, {}).update(timeless(event.payload))
    return found


def answers_of(segment: SegmentDir, iteration: int) -> list[list[int]]:
    lines = (segment.samples / f"iter-{iteration:06d}-train.jsonl").read_text().splitlines()
    return [json.loads(line)["tokens"]["ids"] for line in lines]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SegmentDir]:
    """Every variant in one process, and on two ranks at its stages; and runs that go on on another number of ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "toy").mkdir()
    spec = merged(
        make_toy(folder / "toy"),
        {
            "iterations": ITERATIONS,
            "data": {"max_prompt_tokens": 20},
            # A few texts are longer than the reward model reads.
            "reward": {"max_invalid_share": 0.5, "fallback": 0.1},
            # Many ids end an answer: lengths from 1 to 40.
            "rollout": {"batch_size": 9, "max_new_tokens": 40, "stop_ids": list(range(20, 34))},
            # Three rows and two: two rounds of one row a rank, in the second of which rank 1 has none.
            "update": {"minibatches": 4, "token_budget": 64, "learning_rate": 1e-3},
            "samples": {"per_iteration": 9},
            "checkpoints": {"every": 2},
        },
    )
    alone: dict[str, SegmentDir] = {}
    for variant, (change, _) in VARIANTS.items():
        alone[variant] = toy_segment(folder / variant, merged(spec, change))
    alone["bfloat16"] = toy_segment(folder / "bfloat16", merged(spec, {"policy": {"dtype": "bfloat16"}}))
    together = {
        f"{variant}-{stage}": toy_segment(
            folder / f"{variant}-{stage}", {**merged(spec, VARIANTS[variant][0]), "training": deepspeed(stage)}
        )
        for variant, stage in CASES
    }
    for stage in (1, 2, 3):
        changed = {**merged(spec, {"policy": {"dtype": "bfloat16"}}), "training": deepspeed(stage)}
        together[f"bfloat16-{stage}"] = toy_segment(folder / f"bfloat16-{stage}", changed)
    for stage in STAGES:
        name = f"poisoned-{stage}"
        changed = {**merged(spec, VARIANTS["separate"][0]), "iterations": 1, "training": deepspeed(stage)}
        changed["update"] = {**changed["update"], "critic_warmup_iterations": 0}
        together[name] = toy_segment(folder / name, changed)
    together["offload"] = toy_segment(folder / "offload", {**spec, "training": deepspeed(2, offload="optimizer")})
    run_all(list(alone.values()), 1, folder / "alone")
    # A run of one process goes on on two ranks.
    start = str(alone["plain"].checkpoint(2))
    for stage in STAGES:
        name = f"from-one-{stage}"
        together[name] = toy_segment(folder / name, {**spec, "training": deepspeed(stage)}, checkpoint=start)
    run_all(list(together.values()), 2, folder / "together")
    # A run of two ranks goes on in one process.
    back = {
        f"to-one-{stage}": toy_segment(
            folder / f"to-one-{stage}", spec, checkpoint=str(together[f"plain-{stage}"].checkpoint(2))
        )
        for stage in STAGES
    }
    run_all(list(back.values()), 1, folder / "back")
    return {**alone, **together, **back}


@pytest.mark.parametrize(("variant", "stage"), CASES)
def test_two_ranks_report_what_one_process_does(runs: dict[str, SegmentDir], variant: str, stage: int) -> None:
    """Losses, gradient norms, and every other metric that does not tell of the machine's mood."""
    one, two = metrics_of(runs[variant]), metrics_of(runs[f"{variant}-{stage}"])
    assert one.keys() == two.keys()
    for iteration, metrics in one.items():
        assert two[iteration].keys() == metrics.keys()
        for name, value in metrics.items():
            expected = None if value is None else pytest.approx(value, abs=NEAR, rel=NEAR, nan_ok=True)
            assert two[iteration][name] == expected, (iteration, name)


@pytest.mark.parametrize(("variant", "stage"), CASES)
def test_two_ranks_move_every_weight_as_one_process_does(runs: dict[str, SegmentDir], variant: str, stage: int) -> None:
    one, two = (state_of(runs[name].checkpoint(ITERATIONS)) for name in (variant, f"{variant}-{stage}"))
    for name, tensor in one.items():
        assert (two[name] - tensor).abs().max() <= 1e-5, name
    start = state_of(runs[f"{variant}-{stage}"].checkpoint(2))
    moved = max(float((two[name] - start[name]).abs().max()) for name in two if name.startswith("master/"))
    assert moved >= 1e-3


@pytest.mark.parametrize(("variant", "stage"), CASES)
def test_answers_do_not_depend_on_the_ranks(runs: dict[str, SegmentDir], variant: str, stage: int) -> None:
    for iteration in range(1, ITERATIONS + 1):
        assert answers_of(runs[f"{variant}-{stage}"], iteration) == answers_of(runs[variant], iteration)


def test_every_rank_answers_prompts_of_its_own(runs: dict[str, SegmentDir]) -> None:
    seen = set()
    for event in journal(runs["plain-1"], "shares"):
        first, second = (set(own) for own in event.payload["prompts"])
        assert 0 <= len(first) - len(second) <= 1
        assert not first & second
        assert all(tokens > 0 for tokens in event.payload["response_tokens"])
        seen |= first | second
    assert len(seen) > 9  # of several batches
    lengths = {len(ids) for iteration in (1, 2, 3) for ids in answers_of(runs["plain-1"], iteration)}
    assert min(lengths) <= 3
    assert max(lengths) == 40


def test_at_stage_3_each_rank_holds_half_of_every_parameter(runs: dict[str, SegmentDir]) -> None:
    for rank in (0, 1):
        held = json.loads((runs["plain-3"].path / f"held-{rank}.json").read_text())
        assert len(held) > 20
        assert all(own == (whole + 1) // 2 for own, whole in held.values())
        assert all(
            own == whole for own, whole in json.loads((runs["plain-2"].path / f"held-{rank}.json").read_text()).values()
        )


@pytest.mark.parametrize("stage", STAGES)
def test_state_is_written_once_by_whoever_holds_it(runs: dict[str, SegmentDir], stage: int) -> None:
    folder = runs[f"plain-{stage}"].checkpoint(ITERATIONS)
    files = [path.stat().st_size for path in sorted((folder / "state").glob("rank-*.safetensors"))]
    alone = (runs["plain"].checkpoint(ITERATIONS) / "state" / "rank-0000.safetensors").stat().st_size
    assert len(files) == 2
    assert all(size > 0.3 * alone for size in files)
    assert sum(files) < 1.2 * alone


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", ["from-one", "to-one"])
def test_a_run_goes_on_on_another_number_of_ranks(runs: dict[str, SegmentDir], way: str, stage: int) -> None:
    went_on, straight = runs[f"{way}-{stage}"], runs["plain"]
    assert answers_of(went_on, ITERATIONS) == answers_of(straight, ITERATIONS)
    one, two = (state_of(segment.checkpoint(ITERATIONS)) for segment in (straight, went_on))
    assert one.keys() == two.keys()
    assert max(float((two[name] - one[name]).abs().max()) for name in one) <= 1e-5


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bfloat16_keeps_the_ratio_and_its_stages_agree(runs: dict[str, SegmentDir], stage: int) -> None:
    one, two = metrics_of(runs["bfloat16"]), metrics_of(runs[f"bfloat16-{stage}"])
    assert max(two[iteration]["policy/first_minibatch_ratio_max_dev"] for iteration in (1, 2, 3)) <= 1e-6
    for name in ("policy/loss", "value/loss", "policy/grad_norm", "policy/entropy"):
        assert two[1][name] == pytest.approx(metrics_of(runs["bfloat16-1"])[1][name], rel=1e-4), name
    # Minibatches are made of kept rounds, and a round of two ranks has other rows than one microbatch.
    assert two[1]["policy/entropy"] == pytest.approx(one[1]["policy/entropy"], rel=1e-3)
    assert two[1]["value/loss"] == pytest.approx(one[1]["value/loss"], rel=0.1)
    saved = state_of(runs[f"bfloat16-{stage}"].checkpoint(ITERATIONS))
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all(runs: dict[str, SegmentDir], stage: int) -> None:
    """T21 and T28's kind: neither policy nor critic steps, on no rank, and training goes on."""
    metrics = metrics_of(runs[f"poisoned-{stage}"])[1]
    assert (metrics["optimizer/skipped"], metrics["optimizer/steps"]) == (1, 7)
    assert all(bool(tensor.isfinite().all()) for tensor in state_of(runs[f"poisoned-{stage}"].checkpoint(1)).values())


def test_offloaded_optimizer_states_change_nothing(runs: dict[str, SegmentDir]) -> None:
    offloads = {name: json.loads((runs[name].path / "offloads-1.json").read_text()) for name in ("plain-2", "offload")}
    assert offloads == {"plain-2": False, "offload": True}
    one, two = (state_of(runs[name].checkpoint(ITERATIONS)) for name in ("plain", "offload"))
    assert max(float((two[name] - one[name]).abs().max()) for name in one) <= 1e-5


def test_every_checkpoint_is_a_folder_that_loads_as_it_is(runs: dict[str, SegmentDir]) -> None:
    from transformers import AutoModelForCausalLM

    for name in ("plain-0", "plain-3", "adapters-3"):
        whole = state_of(runs[name].checkpoint(ITERATIONS))
        model, report = AutoModelForCausalLM.from_pretrained(
            checkpoints(runs[name])[-1] / "policy", output_loading_info=True
        )
        assert not report["missing_keys"]
        if name != "adapters-3":
            for key, tensor in model.named_parameters():
                assert torch.equal(tensor, whole[f"master/model.{key}"])
