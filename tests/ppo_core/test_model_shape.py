"""Counted parameters against those of the real classes on tiny random models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from ppo_core.model_shape import model_shape

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


def test_parameters_of_a_published_model_are_right() -> None:
    """GPT-2 small has 124,439,808 parameters."""
    config = {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "vocab_size": 50257,
        "n_positions": 1024,
    }
    shape = model_shape(config)
    assert shape is not None
    assert shape.parameters == 124_439_808


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model_type": "gpt_neox", "hidden_size": 8},
        {"model_type": "llama"},
        {"model_type": "llama", **SIZES, "num_attention_heads": 0},
        {"model_type": "llama", **SIZES, "hidden_size": "wide"},
        {"model_type": ["llama"]},
    ],
)
def test_an_unknown_or_broken_config_is_none_not_a_guess(config: dict[str, Any]) -> None:
    assert model_shape(config) is None
