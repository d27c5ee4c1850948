"""Counted parameters against those of the real classes on tiny random models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from ppo_core.model_shape import model_shape
from ppo_core.models.adapters import add_adapters
from ppo_core.models.loading import caps_attention_scores
from ppo_core.spec.groups import LoRAConfig
from tests.ppo_core.tiny_models import FAMILIES, tiny_model

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WITHOUT_GROUPS = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
GPT2: dict[str, Any] = {"n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 64}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama, tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama, biases": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama, head size of its own": lambda: transformers.LlamaConfig(**SIZES, head_dim=20),
    "mistral": lambda: transformers.MistralConfig(**SIZES),
    "qwen2, tied": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16),
    "qwen3, biases": lambda: transformers.Qwen3Config(**SIZES, head_dim=16, attention_bias=True),
    "gemma": lambda: transformers.GemmaConfig(**SIZES, head_dim=16),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, head_dim=16),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, head_dim=16),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**WITHOUT_GROUPS),
    "gpt_neox, tied, no attention biases": lambda: transformers.GPTNeoXConfig(
        **WITHOUT_GROUPS, attention_bias=False, tie_word_embeddings=True
    ),
    "phi": lambda: transformers.PhiConfig(**SIZES),
    "phi, tied, norms in attention": lambda: transformers.PhiConfig(
        **SIZES, qk_layernorm=True, tie_word_embeddings=True
    ),
    "gpt2": lambda: transformers.GPT2Config(**GPT2, bos_token_id=1, eos_token_id=2),
    "gpt2, inner size of its own": lambda: transformers.GPT2Config(**GPT2, n_inner=96, bos_token_id=1, eos_token_id=2),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_counted_exactly(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]()
    config.save_pretrained(tmp_path)
    shape = model_shape(json.loads((tmp_path / "config.json").read_text(encoding="utf-8")))
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert shape is not None
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())


def llama_sizes(family: str, hidden: int, layers: int, heads: int, inner: int, vocabulary: int) -> dict[str, Any]:
    return {
        "model_type": family,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
    }


PUBLISHED = {
    "GPT-2 small": (
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024},
        124_439_808,
    ),
    "Gemma 2 2B": (
        {**llama_sizes("gemma2", 2304, 26, 8, 9216, 256000), "num_key_value_heads": 4, "head_dim": 256},
        2_614_341_888,
    ),
    "Gemma 3 1B": (
        {**llama_sizes("gemma3_text", 1152, 26, 4, 6912, 262144), "num_key_value_heads": 1, "head_dim": 256},
        999_885_952,
    ),
    "Pythia 70M": (llama_sizes("gpt_neox", 512, 6, 8, 2048, 50304), 70_426_624),
    "Phi 2": (llama_sizes("phi", 2560, 32, 32, 10240, 51200), 2_779_683_840),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_models_are_right(name: str) -> None:
    config, parameters = PUBLISHED[name]
    shape = model_shape(config)
    assert shape is not None
    assert shape.parameters == parameters


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model_type": "gpt_neox", "hidden_size": 8},
        {"model_type": "bloom", **SIZES},
        {"model_type": "llama"},
        {"model_type": "llama", **SIZES, "num_attention_heads": 0},
        {"model_type": "llama", **SIZES, "hidden_size": "wide"},
        {"model_type": ["llama"]},
    ],
)
def test_an_unknown_or_broken_config_is_none_not_a_guess(config: dict[str, Any]) -> None:
    assert model_shape(config) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_adapter_parameters_are_counted_exactly(family: str) -> None:
    model = tiny_model(family)
    add_adapters(model, LoRAConfig(rank=4), seed=1)
    shape = model_shape(model.config.to_dict())
    assert shape is not None
    adapters = sum(each.numel() for name, each in model.named_parameters() if ".lora_" in name)
    assert shape.adapter_parameters(4) == adapters


@pytest.mark.parametrize("name", CONFIGS)
def test_a_critics_body_has_no_matrix_for_logits(name: str) -> None:
    config = CONFIGS[name]()
    shape = model_shape(config.to_dict())
    body = transformers.AutoModel.from_config(config)
    assert shape is not None
    counted, real = shape.body_parameters, sum(parameter.numel() for parameter in body.parameters())
    bias_of_logits = shape.vocabulary if config.model_type == "phi" else 0
    assert counted == real + bias_of_logits


@pytest.mark.parametrize("family", FAMILIES)
def test_a_soft_cap_on_attention_scores_is_seen(family: str) -> None:
    shape = model_shape(tiny_model(family).config.to_dict())
    assert shape is not None
    assert shape.caps_scores == caps_attention_scores(tiny_model(family).config)
