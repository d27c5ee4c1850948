"""Adapters change nothing at the start, are all that is trained, and merge into a folder that is a plain model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ppo_core.models.loading import load_policy, load_reference
from ppo_core.models.policy import PolicyModel
from ppo_core.spec.groups import LoRAConfig, PolicyConfig
from tests.ppo_core.tiny_models import saved, tiny_model

IDS = torch.tensor([[1, 5, 9, 13]])


def adapted(
    folder: Path, family: str = "llama", seed: int = 1, dtype: str = "float32"
) -> tuple[PolicyModel, PolicyConfig]:
    tiny_model(family).save_pretrained(folder)
    config = PolicyConfig(model=str(folder), lora=LoRAConfig(rank=4, alpha=8), dtype=dtype)
    return load_policy(config, seed=seed), config


def moved(policy: PolicyModel) -> PolicyModel:
    """One step on the logits, far enough to be seen."""
    optimizer = torch.optim.SGD([each for each in policy.parameters() if each.requires_grad], lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        policy.model(input_ids=IDS).logits[..., 7].sum().neg().backward()
        optimizer.step()
    return policy


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "phi", "gemma"])
def test_a_start_with_adapters_is_the_starting_policy_and_the_reference_stays_there(
    tmp_path: Path, family: str
) -> None:
    policy, config = adapted(tmp_path, family)
    reference = load_reference(config)
    start = reference.model(input_ids=IDS).logits
    assert torch.equal(policy.model(input_ids=IDS).logits, start)
    moved(policy)
    assert (policy.model(input_ids=IDS).logits - start).abs().max() > 0.1
    assert torch.equal(reference.model(input_ids=IDS).logits, start)


def test_only_adapters_and_the_value_head_are_trained(tmp_path: Path) -> None:
    policy, _ = adapted(tmp_path)
    trained = {name for name, each in policy.named_parameters() if each.requires_grad}
    assert {name for name in trained if ".lora_" not in name} == {"value_head.weight", "value_head.bias"}
    layers = 2 * 7  # four maps of attention and three of the feed-forward part, in two layers
    assert len(trained) == 2 * layers + 2
    adapters = sum(each.numel() for name, each in policy.named_parameters() if ".lora_" in name)
    assert adapters == 4 * 2 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))  # as `ppo_core.estimate` counts


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_saved_folder_is_a_plain_model_with_the_adapters_in_its_weights(tmp_path: Path, family: str) -> None:
    policy, _ = adapted(tmp_path / "start", family)
    saved(moved(policy), tmp_path / "saved")
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert torch.allclose(model.eval()(input_ids=IDS).logits, policy.model(input_ids=IDS).logits, atol=1e-5)
    names = {folder: load_file(tmp_path / folder / "model.safetensors").keys() for folder in ("start", "saved")}
    assert names["saved"] == names["start"]


def test_adapters_start_from_the_runs_own_stream(tmp_path: Path) -> None:
    def first(seed: int) -> torch.Tensor:
        torch.manual_seed(seed * 7)  # the global stream must not matter
        policy, _ = adapted(tmp_path, seed=seed)
        return next(each for name, each in policy.named_parameters() if ".lora_A." in name)

    assert torch.equal(first(1), first(1))
    assert not torch.equal(first(1), first(2))
