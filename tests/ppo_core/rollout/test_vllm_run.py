"""A whole run with the vLLM engine, by changing one line of its spec."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_core.main import run_segment
from ppo_core.rollout.weights import PolicyWeights, Probe
from ppo_core.rundir import ExitCode
from tests.ppo_core.rollout.vllm_engines import SMALL, group_of
from tests.ppo_core.tiny_models import tiny_model
from tests.ppo_core.toy_run import TOKENS, journal, make_toy, toy_segment

pytestmark = pytest.mark.engines

ITERATIONS = 20
# float32, nats.
LARGEST_GAP = 1e-4
SMALLEST_MOVE = 0.05


def test_twenty_iterations_with_weights_that_move_and_logprobs_that_agree(tmp_path: Path) -> None:
    spec = make_toy(tmp_path)
    policy = tiny_model("llama", vocab_size=TOKENS, head_dim=32, max_position_embeddings=128, initializer_range=0.05)
    policy.save_pretrained(tmp_path / "policy")
    spec |= {
        "iterations": ITERATIONS,
        "update": {"learning_rate": 3e-3, "minibatches": 2},
        "rollout": {**spec["rollout"], "engine": "vllm", "vllm": SMALL},
        "checkpoints": {"every": 10},
    }
    said: list[torch.Tensor] = []
    pids: list[int] = []

    def change(trainer: Any) -> None:
        engine = trainer.models.engine
        said.append(trainer.models.trainer.probe().logprobs)
        pids.extend(engine.pids)
        plain = engine.sync_weights

        def sync_weights(weights: PolicyWeights, probe: Probe, version: int) -> Any:
            said.append(probe.logprobs)
            return plain(weights, probe, version)

        engine.sync_weights = sync_weights

    segment = toy_segment(tmp_path / "run", spec)
    assert run_segment(segment, token=1, attempt=1, change=change) == ExitCode.DONE
    moves = [float((after - before).abs().max()) for before, after in itertools.pairwise(said)]
    assert len(moves) == ITERATIONS
    assert min(moves) >= SMALLEST_MOVE
    told = [event for event in journal(segment, "metrics") if "rollout/engine_gap_max" in event.payload]
    assert [event.iteration for event in told] == list(range(1, ITERATIONS + 1))
    assert max(event.payload["rollout/engine_gap_max"] for event in told) < LARGEST_GAP
    assert not [member for pid in pids for member in group_of(pid)]
