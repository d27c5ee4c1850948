"""The sizes of a language model, read from its folder's config.json: enough to count weights and arithmetic.

Exact for Llama, Mistral, Qwen2, Qwen3, Gemma and GPT-2; any other family is None rather than a guess. It loads no
model and no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "gemma")


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one decoder. `body_matmul` counts the weights of all matrix products but the head's.

    An embedding look-up is no arithmetic: `head_matmul` counts the output matrix once, tied or not. `other` are the
    remaining parameters: norms, biases, learned positions, and the input embedding where it is a matrix of its own
    (where it is tied it is the head).
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    body_matmul: int
    other: int

    @property
    def head_matmul(self) -> int:
        return self.hidden * self.vocabulary

    @property
    def parameters(self) -> int:
        """Parameters of the causal language model, tied ones counted once."""
        return self.body_matmul + self.head_matmul + self.other

    @property
    def kv_elements(self) -> int:
        """Numbers that the key-value cache holds for one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def model_shape(config: Mapping[str, Any]) -> ModelShape | None:
    """The shape that a config.json describes; None for a family that is not counted exactly, or missing sizes."""
    family = config.get("model_type")
    try:
        if family in _LLAMA_LIKE:
            return _llama_like(config, str(family))
        return _gpt2(config) if family == "gpt2" else None
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _llama_like(config: Mapping[str, Any], family: str) -> ModelShape:
    hidden, layers, heads = (int(config[key]) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    intermediate, vocabulary = int(config["intermediate_size"]), int(config["vocab_size"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    query, key_value = heads * head_dim, kv_heads * head_dim
    body = layers * (hidden * (query + 2 * key_value) + query * hidden + 3 * hidden * intermediate)

    norms = hidden * (2 * layers + 1) + (2 * head_dim * layers if family == "qwen3" else 0)
    biases = 0
    if family == "qwen2":
        biases += layers * (query + 2 * key_value)
    elif config.get("attention_bias"):
        biases += layers * (query + 2 * key_value + hidden)
    if config.get("mlp_bias"):
        biases += layers * (2 * intermediate + hidden)
    tied = bool(config.get("tie_word_embeddings", family == "gemma"))
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocabulary=vocabulary,
        body_matmul=body,
        other=norms + biases + (0 if tied else vocabulary * hidden),
    )


def _gpt2(config: Mapping[str, Any]) -> ModelShape:
    hidden, layers, heads = (int(config[key]) for key in ("n_embd", "n_layer", "n_head"))
    vocabulary, positions = int(config["vocab_size"]), int(config["n_positions"])
    intermediate = int(config.get("n_inner") or 4 * hidden)
    biases = layers * (3 * hidden + hidden + intermediate + hidden)
    norms = 2 * hidden * (2 * layers + 1)
    tied = bool(config.get("tie_word_embeddings", True))
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=intermediate,
        vocabulary=vocabulary,
        body_matmul=layers * (4 * hidden * hidden + 2 * hidden * intermediate),
        other=norms + biases + positions * hidden + (0 if tied else vocabulary * hidden),
    )
