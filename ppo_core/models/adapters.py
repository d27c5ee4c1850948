"""Low-rank adapters: small trained matrices beside frozen weights, put into a plain model and merged out of it again.

The model keeps its class, so whoever calls it need not know of them. Their second matrix starts at zero, so at the
start the model says exactly what it said without them; nothing in them is dropped out.

Source: Hu et al. 2021, arXiv:2106.09685; the peft library.
"""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ppo_core.seeds import generator
from ppo_core.spec.groups import LoRAConfig

ADAPTER = "default"


def add_adapters(model: Any, lora: LoRAConfig, seed: int) -> None:
    """Freeze every weight of `model` and put adapters beside all its linear maps but the output embedding.

    Args:
        model: a Hugging Face causal language model, changed in place.
        lora: rank, and the factor alpha / rank by which their product is multiplied.
        seed: the run's; the first matrices are drawn from a stream of it.
    """
    model.requires_grad_(False)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        target_modules="all-linear",
        bias="none",
        # GPT-2 keeps its maps transposed.
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    for name, layer in _layers(model):
        first: nn.Parameter = layer.lora_A[ADAPTER].weight
        bound = first.shape[1] ** -0.5  # what torch draws for a linear map
        drawn = torch.rand(first.shape, generator=generator(seed, "adapters", name)) * (2 * bound) - bound
        with torch.no_grad():
            first.copy_(drawn)


def is_adapter(name: str) -> bool:
    """Whether a parameter of a model with adapters is one of theirs."""
    return ".lora_" in name


def plain_name(name: str) -> str:
    """The name that a weight has in the model without adapters."""
    return name.replace(".base_layer.", ".")


def merged_weight(model: Any, name: str, weight: Tensor) -> Tensor:
    """The weight `name` with the value that it would have without an adapter beside it; itself where there is none."""
    beside, _, last = name.rpartition(".base_layer.")
    if last != "weight":
        return weight
    delta: Tensor = model.get_submodule(beside).get_delta_weight(ADAPTER).detach()
    return weight + delta.to(weight.dtype)


def _layers(model: Any) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]
