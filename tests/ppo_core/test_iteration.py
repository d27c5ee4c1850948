"""One iteration after another, through the run's entry point: whose logprobs, whose weights, whose random numbers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ppo_core import registry
from ppo_core.main import run_segment
from ppo_core.rollout.engine import Response, RolloutEngine, SyncReport
from ppo_core.rollout.weights import PolicyWeights, Probe
from ppo_core.rundir import ControlCommand, ExitCode, SegmentDir, checkpoints, send_command
from tests.ppo_core.toy_run import journal, make_toy, timeless, toy_segment


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """No held-out answers, and every response kept."""
    made = make_toy(tmp_path_factory.mktemp("toy"))
    return {**made, "data": {**made["data"], "held_out": None}, "samples": {"per_iteration": 8}}


class Misspeaking:
    """An engine whose logprobs are off by 0.3 nats, up and down in turn; its responses and weights are as they were."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def rows_at_once(self) -> int | None:
        return self._engine.rows_at_once

    def generate(
        self, prompt_ids: list[list[int]], *, seeds: list[int], check: Callable[[], None] | None = None
    ) -> list[Response]:
        errors = itertools.cycle((0.3, -0.3))
        said = self._engine.generate(prompt_ids, seeds=seeds, check=check)
        return [replace(one, logprobs=[logprob + next(errors) for logprob in one.logprobs]) for one in said]

    def sync_weights(self, weights: PolicyWeights, probe: Probe, version: int) -> SyncReport:
        return self._engine.sync_weights(weights, probe, version)

    def rest(self) -> None:
        self._engine.rest()

    def close(self) -> None:
        self._engine.close()


class Noting(Misspeaking):
    """Notes what it is asked for."""

    def __init__(self, engine: RolloutEngine, asked: list[str]) -> None:
        super().__init__(engine)
        self._asked = asked

    def generate(self, *arguments: Any, **more: Any) -> list[Response]:
        self._asked.append("generate")
        return super().generate(*arguments, **more)

    def sync_weights(self, weights: PolicyWeights, probe: Probe, version: int) -> SyncReport:
        self._asked.append("sync")
        return super().sync_weights(weights, probe, version)

    def rest(self) -> None:
        self._asked.append("rest")


def metrics_of(segment: SegmentDir) -> dict[int, dict[str, Any]]:
    return {event.iteration: timeless(event.payload) for event in journal(segment, "metrics")}


def responses_of(segment: SegmentDir, iteration: int) -> list[list[int]]:
    lines = (segment.samples / f"iter-{iteration:06d}-train.jsonl").read_text().splitlines()
    return [json.loads(line)["tokens"]["ids"] for line in lines]


def ran(run_dir: Path, spec: dict[str, Any], change: Callable[[Any], None] | None = None) -> SegmentDir:
    segment = toy_segment(run_dir, spec)
    assert run_segment(segment, token=0, attempt=1, change=change) == ExitCode.DONE
    return segment


def test_an_engines_own_logprobs_are_measured_and_never_trained_on(toy: dict[str, Any], tmp_path: Path) -> None:
    """T20: RLinf/RLinf#1534. Rate 1e-12, an engine off by 0.3 nats: the ratio is 1, the gap told."""
    spec = {**toy, "update": {"learning_rate": 1e-12, "minibatches": 2}}

    def change(trainer: Any) -> None:
        trainer.models = replace(trainer.models, engine=Misspeaking(trainer.models.engine))

    for metrics in metrics_of(ran(tmp_path / "off", spec, change)).values():
        assert metrics["policy/first_minibatch_ratio_max_dev"] < 1e-3
        assert metrics["policy/ratio_max"] == pytest.approx(1.0, abs=1e-3)
        assert metrics["policy/clip_fraction"] == 0
        assert metrics["rollout/engine_gap_mean"] == pytest.approx(0.3, abs=1e-3)
        assert metrics["rollout/engine_gap_max"] == pytest.approx(0.3, abs=1e-3)
    for metrics in metrics_of(ran(tmp_path / "true", spec)).values():
        assert metrics["rollout/engine_gap_max"] < 1e-4
    for name in ("rollout/engine_gap_mean", "rollout/engine_gap_max", "rollout/engine_gap_k3"):
        band = registry.metric(name).band
        assert band is not None
        assert (band.high, band.relative_to, band.measure) == (3.0, "baseline", "factor")


def test_the_seed_of_the_spec_decides_the_first_rollout(toy: dict[str, Any], tmp_path: Path) -> None:
    """T39: vllm-project/vllm#11953. Seed 1 twice is the same, seed 2 another; no two iterations draw the same."""
    once, again, other = (
        ran(tmp_path / name, {**toy, "seed": seed}) for name, seed in (("once", 1), ("again", 1), ("other", 2))
    )
    assert responses_of(once, 1) == responses_of(again, 1)
    assert responses_of(once, 1) != responses_of(other, 1)
    assert responses_of(once, 1) != responses_of(once, 2)


@pytest.mark.parametrize(
    "policy", [{}, {"lora": {"rank": 4, "alpha": 8}}, {"value_head": "separate", "dtype": "bfloat16"}]
)
def test_every_rollout_is_of_the_newest_weights(toy: dict[str, Any], tmp_path: Path, policy: dict[str, Any]) -> None:
    """T35: huggingface/trl#5312. The version counts updates, and the engine says what the moved policy says."""
    spec = {**toy, "policy": {**toy["policy"], **policy}, "update": {"learning_rate": 0.01, "minibatches": 2}}
    segment = ran(tmp_path, spec)
    metrics = metrics_of(segment)
    allowed = 0.1 if policy.get("dtype") == "bfloat16" else 1e-4
    for iteration in (1, 2, 3):
        assert metrics[iteration]["rollout/policy_version"] == iteration - 1
        assert metrics[iteration]["rollout/engine_gap_max"] < allowed
        assert (metrics[iteration]["kl/ref_token_k3"] > 1e-3) == (iteration > 1)
    state = json.loads((checkpoints(segment)[-1] / "state.json").read_text())["trainer"]
    assert state["policy_version"] == 3


def test_an_engine_rests_from_the_rollout_to_the_sync(toy: dict[str, Any], tmp_path: Path) -> None:
    """What it gives up of a GPU's memory is the trainer's for scoring, passes and update, in every iteration."""
    asked: list[str] = []

    def change(trainer: Any) -> None:
        trainer.models = replace(trainer.models, engine=Noting(trainer.models.engine, asked))

    ran(tmp_path, toy, change)
    assert asked == ["generate", "rest", "sync"] * 3


def test_a_restart_goes_on_counting_versions(toy: dict[str, Any], tmp_path: Path) -> None:
    """T35's kind: an engine that starts anew holds the checkpoint's weights, not the spec's, and says so."""
    segment = toy_segment(tmp_path, {**toy, "checkpoints": {"every": 2}})

    def stop(trainer: Any) -> None:
        score = trainer.models.reward.sources[0][0].score

        def asking(*texts: Any) -> Any:
            if trainer.control.iteration == 3:
                send_command(segment, ControlCommand("c-1", "stop", 1))
                trainer.control._looked_at = 0.0
            return score(*texts)

        trainer.models.reward.sources[0][0].score = asking

    assert run_segment(segment, token=1, attempt=1, change=stop) == ExitCode.STOPPED
    assert run_segment(segment, token=2, attempt=2) == ExitCode.DONE
    assert [metrics_of(segment)[number]["rollout/policy_version"] for number in (1, 2, 3)] == [0, 1, 2]
    assert metrics_of(segment)[3]["rollout/engine_gap_max"] < 1e-4
