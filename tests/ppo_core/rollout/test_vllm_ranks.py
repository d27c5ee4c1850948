"""One vLLM engine serves two ranks whose weights are in parts, and its replicas and the ranks change no answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ppo_core.rundir import SegmentDir
from tests.ppo_core.rank_processes import run_all
from tests.ppo_core.rollout.vllm_engines import SMALL
from tests.ppo_core.tiny_models import tiny_model
from tests.ppo_core.toy_run import TOKENS, journal, make_toy, toy_segment

pytestmark = pytest.mark.engines

ITERATIONS = 2


def answers(segment: SegmentDir) -> list[list[int]]:
    files = sorted(segment.samples.glob("*-train.jsonl"))
    return [json.loads(line)["tokens"]["ids"] for file in files for line in file.read_text().splitlines()]


def test_the_seed_decides_whatever_the_ranks_and_replicas(tmp_path: Path) -> None:
    spec = make_toy(tmp_path)
    policy = tiny_model("llama", vocab_size=TOKENS, head_dim=32, max_position_embeddings=128, initializer_range=0.05)
    policy.save_pretrained(tmp_path / "policy")
    spec |= {
        "iterations": ITERATIONS,
        "rollout": {**spec["rollout"], "engine": "vllm", "vllm": SMALL},
        "samples": {"per_iteration": 8},
    }
    shared = {
        **spec,
        "rollout": {**spec["rollout"], "vllm": {**SMALL, "replicas": 2}},
        "training": {"engine": "deepspeed", "ranks": 2, "zero_stage": 3},
    }
    alone, together = toy_segment(tmp_path / "alone", spec), toy_segment(tmp_path / "together", shared)
    run_all([alone], 1, tmp_path / "alone-log", seconds=300)
    run_all([together], 2, tmp_path / "together-log", seconds=300)
    assert len(answers(alone)) == 8 * ITERATIONS
    assert answers(together) == answers(alone)
    for event in journal(together, "shares"):
        # On a processor rank 0's engine answers for all; both ranks train.
        first, second = event.payload["prompts"]
        assert (len(first), len(second)) == (8, 0)
        assert all(tokens > 0 for tokens in event.payload["response_tokens"])
    gaps = [event.payload["rollout/engine_gap_max"] for event in journal(together, "metrics") if event.iteration]
    assert max(gap for gap in gaps if gap is not None) < 1e-4
