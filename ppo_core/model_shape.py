"""The sizes of a language model, read from its folder's config.json: enough to count weights and arithmetic.

Exact for Llama, Mistral, Qwen2, Qwen3, Gemma (1, 2 and the text models of 3), GPT-2, GPT-NeoX and Phi; any other
family is None rather than a guess. It loads no model and no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_GEMMAS = ("gemma", "gemma2", "gemma3_text")
_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", *_GEMMAS)
_HEAD_NORMS = ("qwen3", "gemma3_text")  # of queries and keys, each as wide as a head
_FUSED_ATTENTION = ("gpt2", "gpt_neox")  # one map makes queries, keys and values
_GEMMA2_CAP = 50.0  # of a config that does not say
_FOUR_NORMS = ("gemma2", "gemma3_text")  # before and after attention and feed-forward, where others have two


# Logits that the head holds at once: 32 MiB in float32, of which backward keeps a few copies.
HEAD_LOGITS = 2**23
# Fewer rows than this leave a fast device waiting, however large the vocabulary.
MIN_HEAD_POSITIONS = 256


def head_positions(vocabulary: int) -> int:
    """Positions whose logits the language-model head makes at once."""
    return max(MIN_HEAD_POSITIONS, HEAD_LOGITS // vocabulary)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one decoder. `body_matmul` counts the weights of all matrix products but the head's.

    An embedding look-up is no arithmetic: `head_matmul` counts the output matrix once, tied or not. `other` are the
    remaining parameters: norms, biases, learned positions, and the input embedding where it is a matrix of its own
    (where it is tied it is the head). `caps_scores`: attention scores are held under a soft cap, which only the
    family's own attention computes, so they are kept as squares.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    body_matmul: int
    other: int
    tied: bool
    caps_scores: bool = False

    @property
    def queries(self) -> int:
        """Width of all queries of a layer."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of all keys of a layer, and of all values."""
        return self.kv_heads * self.head_dim

    @property
    def head_matmul(self) -> int:
        return self.hidden * self.vocabulary

    @property
    def parameters(self) -> int:
        """Parameters of the causal language model, tied ones counted once."""
        return self.body_matmul + self.head_matmul + self.other

    @property
    def body_parameters(self) -> int:
        """Parameters without the matrix that makes logits; where it is tied it stays as the input embedding."""
        return self.parameters - (0 if self.tied else self.head_matmul)

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of adapters beside all maps of all layers: rank · (in + out) for each map."""
        fused = self.family in _FUSED_ATTENTION
        inputs = self.hidden + self.queries + 2 * self.keys if fused else 3 * self.hidden + self.queries + 2 * self.keys
        feed_forward = (3 if self.family in _LLAMA_LIKE else 2) * (self.hidden + self.intermediate)
        return self.layers * rank * (inputs + self.queries + self.hidden + feed_forward)

    @property
    def kv_elements(self) -> int:
        """Numbers that the key-value cache holds for one token."""
        return 2 * self.layers * self.keys


def model_shape(config: Mapping[str, Any]) -> ModelShape | None:
    """The shape that a config.json describes; None for a family that is not counted exactly, or missing sizes."""
    family = config.get("model_type")
    try:
        if family in _LLAMA_LIKE:
            return _llama_like(config, str(family))
        others = {"gpt2": _gpt2, "gpt_neox": _gpt_neox, "phi": _phi}
        count = others.get(str(family))
        return None if count is None else count(config)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _llama_like(config: Mapping[str, Any], family: str) -> ModelShape:
    hidden, layers, heads = (int(config[key]) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    intermediate, vocabulary = int(config["intermediate_size"]), int(config["vocab_size"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    query, key_value = heads * head_dim, kv_heads * head_dim
    body = layers * (hidden * (query + 2 * key_value) + query * hidden + 3 * hidden * intermediate)

    norms = hidden * ((4 if family in _FOUR_NORMS else 2) * layers + 1)
    if family in _HEAD_NORMS:
        norms += 2 * head_dim * layers
    biases = 0
    if family == "qwen2":
        biases += layers * (query + 2 * key_value)
    elif config.get("attention_bias"):
        biases += layers * (query + 2 * key_value + hidden)
    if config.get("mlp_bias"):
        biases += layers * (2 * intermediate + hidden)
    tied = bool(config.get("tie_word_embeddings", family in _GEMMAS))
    cap = config.get("attn_logit_softcapping", _GEMMA2_CAP if family == "gemma2" else None)
    return ModelShape(
        family=family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocabulary=vocabulary,
        body_matmul=body,
        other=norms + biases + (0 if tied else vocabulary * hidden),
        tied=tied,
        caps_scores=cap is not None,
    )


def _gpt2(config: Mapping[str, Any]) -> ModelShape:
    hidden, layers, heads = (int(config[key]) for key in ("n_embd", "n_layer", "n_head"))
    vocabulary, positions = int(config["vocab_size"]), int(config["n_positions"])
    intermediate = int(config.get("n_inner") or 4 * hidden)
    biases = layers * (3 * hidden + hidden + intermediate + hidden)
    norms = 2 * hidden * (2 * layers + 1)
    tied = bool(config.get("tie_word_embeddings", True))
    return ModelShape(
        family="gpt2",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=intermediate,
        vocabulary=vocabulary,
        body_matmul=layers * (4 * hidden * hidden + 2 * hidden * intermediate),
        other=norms + biases + positions * hidden + (0 if tied else vocabulary * hidden),
        tied=tied,
    )


def _gpt_neox(config: Mapping[str, Any]) -> ModelShape:
    hidden, layers, heads = (int(config[key]) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    intermediate, vocabulary = int(config["intermediate_size"]), int(config["vocab_size"])
    biases = layers * (intermediate + hidden)
    if config.get("attention_bias", True):
        biases += layers * (3 * hidden + hidden)
    norms = 2 * hidden * (2 * layers + 1)
    tied = bool(config.get("tie_word_embeddings", False))
    return ModelShape(
        family="gpt_neox",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=intermediate,
        vocabulary=vocabulary,
        body_matmul=layers * (4 * hidden * hidden + 2 * hidden * intermediate),
        other=norms + biases + (0 if tied else vocabulary * hidden),
        tied=tied,
    )


def _phi(config: Mapping[str, Any]) -> ModelShape:
    hidden, layers, heads = (int(config[key]) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    intermediate, vocabulary = int(config["intermediate_size"]), int(config["vocab_size"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = hidden // heads
    keys_values = 2 * kv_heads * head_dim
    biases = layers * (hidden + keys_values + hidden + intermediate + hidden) + vocabulary  # The head has one, too.
    # Attention and feed-forward stand side by side behind one norm.
    norms = 2 * hidden * (layers + 1) + (4 * head_dim * layers if config.get("qk_layernorm") else 0)
    tied = bool(config.get("tie_word_embeddings", False))
    return ModelShape(
        family="phi",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocabulary=vocabulary,
        body_matmul=layers * (hidden * (hidden + keys_values) + hidden * hidden + 2 * hidden * intermediate),
        other=norms + biases + (0 if tied else vocabulary * hidden),
        tied=tied,
    )
