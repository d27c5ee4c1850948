"""What shaping and the KL controller carry from one iteration to the next, through stops, restarts and roll backs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ppo_core.main import run_segment
from ppo_core.rundir import ControlCommand, ExitCode, SegmentDir, checkpoints, send_command
from tests.ppo_core.toy_run import journal, make_toy, timeless, toy_segment

pytestmark = pytest.mark.runs

TARGET = 0.02  # nats a response
ADAPTIVE = {"controller": "adaptive", "coef": 0.1, "target": TARGET, "horizon": 16}


@pytest.fixture(scope="module")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The toy spec with everything in play that has a state, a checkpoint each iteration, and no held-out answers."""
    toy = make_toy(tmp_path_factory.mktemp("toy"))
    toy["update"]["learning_rate"] = 3e-3  # beyond the target within one iteration
    toy["rollout"]["stop_ids"] = list(range(10, 50))  # answers of one to eight tokens, so that there is a slope
    toy["reward"] |= {"normalize": True, "length_baseline": "linear", "clip": 3.0}
    toy |= {"kl": ADAPTIVE, "checkpoints": {"every": 1, "keep_last": -1}, "data": {**toy["data"], "held_out": None}}
    return {**toy, "iterations": 4}


@pytest.fixture(scope="module")
def straight(shaped: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> SegmentDir:
    segment = toy_segment(tmp_path_factory.mktemp("run"), shaped)
    assert run_segment(segment, token=0, attempt=1) == ExitCode.DONE
    return segment


def metrics_of(segment: SegmentDir) -> dict[int, dict[str, Any]]:
    return {event.iteration: timeless(event.payload) for event in journal(segment, "metrics")}


def state_of(checkpoint: Path) -> dict[str, Any]:
    """The trainer's state in a checkpoint, without the time that it took."""
    state: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())["trainer"]
    return {name: value for name, value in state.items() if name != "hours"}


def test_the_coefficient_and_the_moments_move_by_their_formulas(straight: SegmentDir) -> None:
    found = metrics_of(straight)
    assert found[1]["kl/target_error"] == pytest.approx(-1.0, abs=1e-3)  # the policy is its own reference still
    for number in (1, 2, 3):
        now, following = found[number], found[number + 1]
        error = (now["kl/ref_sequence"] - TARGET) / TARGET
        assert now["kl/target_error"] == pytest.approx(error, rel=1e-5)
        clipped = min(max(error, -0.2), 0.2)
        assert following["kl/coef"] == pytest.approx(now["kl/coef"] * (1 + clipped * 8 / 16), rel=1e-6)
    assert found[2]["kl/coef"] < found[1]["kl/coef"] == 0.1
    assert found[2]["kl/coef"] < found[3]["kl/coef"] < found[4]["kl/coef"]
    means = [found[number]["reward/corrected_mean"] for number in (1, 2, 3, 4)]
    for number in (1, 2, 3, 4):
        assert found[number]["reward/running_mean"] == pytest.approx(math.fsum(means[:number]) / number, abs=1e-6)
        assert found[number]["reward/corrected_mean"] == pytest.approx(found[number]["reward/score_mean"], abs=1e-6)
        assert found[number]["reward/corrected_std"] < found[number]["reward/score_std"]
    assert found[1]["reward/normalized_mean"] == pytest.approx(0.0, abs=1e-6)
    assert found[1]["reward/normalized_std"] == pytest.approx(1.0, abs=1e-3)


def test_a_restart_goes_on_bit_for_bit(shaped: dict[str, Any], straight: SegmentDir, tmp_path: Path) -> None:
    """Stopped in the update of iteration 2, which is finished, and started again by a new process's assembly."""
    segment = toy_segment(tmp_path, shaped)

    def change(trainer: Any) -> None:
        step = trainer.models.trainer.step

        def asking() -> Any:
            if trainer.control.iteration == 2:
                send_command(segment, ControlCommand("c-1", "stop", 1))
            return step()

        trainer.models.trainer.step = asking

    assert run_segment(segment, token=1, attempt=1, change=change) == ExitCode.STOPPED
    assert max(metrics_of(segment)) == 2
    assert run_segment(segment, token=2, attempt=2) == ExitCode.DONE
    same_end(segment, straight)


@pytest.mark.parametrize("place", ["generate", "score", "logprobs"])
def test_an_iteration_that_is_given_up_moves_neither(
    shaped: dict[str, Any], straight: SegmentDir, tmp_path: Path, place: str
) -> None:
    segment = toy_segment(tmp_path, shaped)

    def change(trainer: Any) -> None:
        def after_asking(call: Any) -> Any:
            def asking(*args: Any, **kwargs: Any) -> Any:
                if trainer.control.iteration == 3:
                    send_command(segment, ControlCommand("c-1", "stop", 1))
                    trainer.control._looked_at = -math.inf
                return call(*args, **kwargs)

            return asking

        models = trainer.models
        if place == "generate":
            models.engine.generate = after_asking(models.engine.generate)
        elif place == "score":
            source, _ = models.reward.sources[0]
            source.score = after_asking(source.score)
        else:
            models.trainer.forward = after_asking(models.trainer.forward)

    assert run_segment(segment, token=1, attempt=1, change=change) == ExitCode.STOPPED
    assert max(metrics_of(segment)) == 2
    assert state_of(checkpoints(segment)[-1]) == state_of(straight.checkpoint(2))
    assert run_segment(segment, token=2, attempt=2) == ExitCode.DONE
    same_end(segment, straight)


def same_end(segment: SegmentDir, straight: SegmentDir) -> None:
    assert metrics_of(segment) == metrics_of(straight)
    mine, theirs = checkpoints(segment)[-1], checkpoints(straight)[-1]
    assert state_of(mine) == state_of(theirs)
    weights, others = (load_file(folder / "policy" / "model.safetensors") for folder in (mine, theirs))
    assert all(torch.equal(weights[name], others[name]) for name in others)


def rolled_back(straight: SegmentDir, run_dir: Path, spec: dict[str, Any]) -> SegmentDir:
    """A second segment from the straight run's checkpoint of iteration 2, for one iteration."""
    segment = toy_segment(run_dir, {**spec, "iterations": 3}, number=2, checkpoint=str(straight.checkpoint(2)))
    assert run_segment(segment, token=3, attempt=1) == ExitCode.DONE
    return segment


def test_a_roll_back_goes_on_with_the_checkpoints_coefficient(
    shaped: dict[str, Any], straight: SegmentDir, tmp_path: Path
) -> None:
    segment = rolled_back(straight, tmp_path, {**shaped, "kl": {**ADAPTIVE, "target": 0.5}})
    assert metrics_of(segment)[3]["kl/coef"] == metrics_of(straight)[3]["kl/coef"]
    assert metrics_of(segment)[3]["kl/coef"] != 0.1
    assert state_of(segment.checkpoint(3))["score_moments"] == state_of(straight.checkpoint(3))["score_moments"]


def test_a_roll_back_that_changes_the_coefficient_wins(
    shaped: dict[str, Any], straight: SegmentDir, tmp_path: Path
) -> None:
    segment = rolled_back(straight, tmp_path, {**shaped, "kl": {**ADAPTIVE, "coef": 0.3}})
    assert metrics_of(segment)[3]["kl/coef"] == 0.3
    # What follows is a plain restart: it goes on from what the controller made of 0.3.
    more = toy_segment(
        tmp_path, {**shaped, "kl": {**ADAPTIVE, "coef": 0.3}}, number=3, checkpoint=str(segment.checkpoint(3))
    )
    assert run_segment(more, token=4, attempt=1) == ExitCode.DONE
    assert metrics_of(more)[4]["kl/coef"] == state_of(segment.checkpoint(3))["kl_coef"] != 0.3


def test_a_roll_back_to_another_score_begins_its_moments_anew(
    shaped: dict[str, Any], straight: SegmentDir, tmp_path: Path
) -> None:
    sources = [{**shaped["reward"]["sources"][0], "weight": 10.0}]
    segment = rolled_back(straight, tmp_path, {**shaped, "reward": {**shaped["reward"], "sources": sources}})
    assert state_of(segment.checkpoint(3))["score_moments"]["count"] == 8
    assert metrics_of(segment)[3]["reward/normalized_std"] == pytest.approx(1.0, abs=1e-3)
    moments, usual = [event.payload["message"] for event in journal(segment, "note")]
    assert "reward.normalize begins anew" in moments
    assert "what is usual for this run is learned anew" in usual
