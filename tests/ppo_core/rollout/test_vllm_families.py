"""Every shape of model that the trainer knows but Phi, in the real vLLM: names, fused maps and biases all arrive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_core.models.policy import PolicyModel
from ppo_core.rollout.weights import PolicyWeights, probe_of, weights_digest
from tests.ppo_core.rollout.engine_contract import PROMPTS, SEEDS, TOKENS, said_by
from tests.ppo_core.rollout.vllm_engines import moved, started_engine, synced, vllm_config
from tests.ppo_core.tiny_models import tiny_model

pytestmark = pytest.mark.slow  # a process of vLLM for each

WIDE = {"hidden_size": 128}
# Of two implementations, float32, nats; some leave rounding more room, such as a soft cap.
TOLERANCE = 5e-4
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 32},
    "qwen2": WIDE,
    "qwen3": {"head_dim": 32},
    "mistral": WIDE,
    "gemma": {"head_dim": 32},
    "gemma2": {"head_dim": 32},
    "gemma3": {"head_dim": 32},
    "gpt2": {"n_embd": 128},
    "gpt_neox": WIDE,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_every_family_arrive_and_are_used(family: str, tmp_path: Path) -> None:
    policy = PolicyModel(tiny_model(family, vocab_size=TOKENS, **FAMILIES[family]))
    engine = started_engine(policy, tmp_path, vllm_config())
    try:
        synced(engine, policy, 1)
        synced(engine, moved(policy), 2)
        for prompt, one in zip(PROMPTS, engine.generate(PROMPTS, seeds=SEEDS), strict=True):
            assert torch.tensor(one.logprobs) == pytest.approx(said_by(policy, prompt, one, 1.0), abs=TOLERANCE)
    finally:
        engine.close()


def test_in_bfloat16_the_weights_arrive_bit_for_bit_and_logprobs_agree_as_far_as_it_goes(tmp_path: Path) -> None:
    policy = PolicyModel(tiny_model("llama", vocab_size=TOKENS, **FAMILIES["llama"]).to(torch.bfloat16))
    engine = started_engine(policy, tmp_path, vllm_config())
    try:
        synced(engine, policy, 1)
        report = engine.sync_weights(PolicyWeights(moved(policy)), probe_of(policy), 2)
        assert report.digest == weights_digest(PolicyWeights(policy))
        for prompt, one in zip(PROMPTS, engine.generate(PROMPTS, seeds=SEEDS), strict=True):
            assert torch.tensor(one.logprobs) == pytest.approx(said_by(policy, prompt, one, 1.0), abs=0.2)
    finally:
        engine.close()
