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


def merged_state_dict(model: Any) -> dict[str, Tensor]:
    """The model's weights by the names and with the values that it would have without adapters beside them."""
    deltas = {f"{name}.weight": layer.get_delta_weight(ADAPTER) for name, layer in _layers(model)}
    found = {}
    for name, tensor in model.state_dict().items():
        if ".lora_" in name:
            continue
        plain = name.replace(".base_layer.", ".")
        found[plain] = tensor + deltas[plain].to(tensor.dtype) if plain in deltas else tensor
    return found


def _layers(model: Any) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]
