"""States by engine and ZeRO stage, worked by hand; `test_memory` compares them with what real ranks hold."""

from __future__ import annotations

from typing import Any

import pytest

from ppo_core.estimate import estimate
from ppo_core.memory import MemoryEstimate
from ppo_core.spec import parse_spec

# One layer of 4·64·64 + 3·64·128 weights and 2·64 of norms, one more norm, and embedding and head of 1000·64 each.
SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 1000,
}
PARAMETERS = 4 * 4096 + 3 * 8192 + 3 * 64 + 2 * 64000
TRAINED = PARAMETERS + 65  # and a value head
RANKS = 4


def memory_of(**groups: Any) -> MemoryEstimate:
    raw = {
        "name": "t",
        "policy": {"model": "/nowhere/policy"},
        "data": {"prompts": "/nowhere/train.jsonl"},
        "reward": {"sources": [{"kind": "python", "name": "r"}]},
        **groups,
    }
    raw["policy"] = {"model": "/nowhere/policy", **groups.get("policy", {})}
    found = estimate(parse_spec(raw), SHAPE).memory
    assert found is not None
    return found


def on_ranks(stage: int, dtype: str, **groups: Any) -> MemoryEstimate:
    training = {"engine": "deepspeed", "ranks": RANKS, "zero_stage": stage, **groups.pop("training", {})}
    return memory_of(policy={"dtype": dtype}, training=training, **groups)


@pytest.mark.parametrize(
    ("stage", "dtype", "whole", "shared"),
    [
        (0, "float32", 16, 0),
        (1, "float32", 8, 12),
        (2, "float32", 4, 16),
        (3, "float32", 0, 20),  # a float32 weight and its master are two
        (1, "bfloat16", 4, 12),
        (2, "bfloat16", 2, 14),
        (3, "bfloat16", 0, 16),
    ],
)
def test_bytes_a_trained_parameter_whole_and_shared_over_the_ranks(
    stage: int, dtype: str, whole: int, shared: int
) -> None:
    states = on_ranks(stage, dtype).states
    trained = states.total - states.frozen_bytes
    assert trained == pytest.approx((whole + shared / RANKS) * TRAINED, abs=8)


@pytest.mark.parametrize(("stage", "copies"), [(1, 1), (2, 1), (3, 2)])
def test_only_stage_3_needs_a_whole_policy_to_generate_with(stage: int, copies: int) -> None:
    weight = 2
    assert on_ranks(stage, "bfloat16").states.frozen_bytes == copies * weight * PARAMETERS
    vllm = on_ranks(stage, "bfloat16", rollout={"engine": "vllm"})
    assert vllm.states.frozen_bytes == weight * PARAMETERS
    assert vllm.engines_bytes > weight * PARAMETERS + 2**30  # the cache that a processor's engine is given


def test_gradients_are_added_up_in_float32_on_every_rank_under_stage_1() -> None:
    assert on_ranks(1, "bfloat16").states.gradient_sums_bytes == 4 * TRAINED
    assert on_ranks(3, "bfloat16").states.gradient_sums_bytes == pytest.approx(2 * TRAINED / RANKS, abs=2)


def test_offloading_moves_the_optimizer_from_gpus_to_main_memory() -> None:
    stays = on_ranks(2, "bfloat16", resources={"gpus": RANKS})
    moved = on_ranks(2, "bfloat16", resources={"gpus": RANKS}, training={"offload": "optimizer"})
    assert stays.update_bytes - moved.update_bytes >= stays.states.masters_bytes + stays.states.moments_bytes
    assert moved.host_bytes - stays.host_bytes == RANKS * stays.states.optimizer


def test_main_memory_is_that_of_all_ranks() -> None:
    one = on_ranks(2, "float32")
    assert one.host_bytes == RANKS * one.peak_bytes
