"""Bytes that a pass over tokens holds beside the weights: what is kept for the backward pass, what a layer needs while
it runs, logits, and the key-value cache.

Counted from the sizes of a model, for rows of the greatest length; the layers' parts are those that torch keeps for
the families of `model_shape`, compared with it in a test. It knows no optimizer, no rank and no spec, and no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from ppo_core.model_shape import ModelShape, head_positions

FLOAT = 4
_DOUBLE = 8
# Rows as wide as the feed-forward part that a layer keeps: gate, its activation, up and their product; or the input,
# the steps of a hand-written GELU and its output; or input and output of a built-in one.
_WIDE_ROWS = {"gpt2": 5, "gpt_neox": 2, "phi": 5}
_GATED_WIDE_ROWS, _GATED_WIDE_ROWS_PASSING = 4, 3
_NORMS = {"gemma2": 4, "gemma3_text": 4, "phi": 1}
_LAYER_NORM = ("gpt2", "gpt_neox", "phi")
_GEMMAS = ("gemma", "gemma2", "gemma3_text")
_HEAD_NORMS = ("qwen3", "gemma3_text")


@dataclass(frozen=True)
class Tokens:
    """What one pass runs over: `tokens` in all, in rows of `longest`; `weight_bytes` of a number: 4, or 2 in bfloat16.

    `packed` rows lie end to end and have no mask.
    """

    tokens: int
    longest: int
    weight_bytes: int
    packed: bool = False


def kept_bytes(shape: ModelShape, over: Tokens, gradient_checkpointing: bool) -> int:
    """Bytes that a forward pass of the body keeps for its backward pass.

    With gradient checkpointing the inputs of all layers, and one layer's inside while it is made again.
    """
    layer = over.tokens * _layer_bytes(shape, over)
    end = over.tokens * (_norm_bytes(shape, over.weight_bytes) + over.weight_bytes * shape.hidden)
    if gradient_checkpointing:
        return layer + shape.layers * over.tokens * over.weight_bytes * shape.hidden + end
    return shape.layers * layer + end


def passing_bytes(shape: ModelShape, over: Tokens) -> int:
    """Bytes that a forward pass without gradient holds at its widest place: inside one layer."""
    weight = over.weight_bytes
    wide = _WIDE_ROWS.get(shape.family, _GATED_WIDE_ROWS_PASSING)
    feed_forward = weight * (2 * shape.hidden + wide * shape.intermediate)
    attention = weight * (2 * shape.hidden + 3 * shape.queries + 2 * shape.keys) + _square_bytes(shape, over, True)
    return over.tokens * max(feed_forward, attention)


def head_bytes(shape: ModelShape, positions: int) -> int:
    """Bytes of logits while the language-model head works: float32, on as many positions as it takes at once.

    The logits, their centred copy, and what their sum or their gradient takes beside them.
    """
    return 3 * FLOAT * min(positions, head_positions(shape.vocabulary)) * shape.vocabulary


def decoding_bytes(shape: ModelShape, rows: int, prompt: int, longest: int, weight_bytes: int) -> int:
    """Bytes that batched decoding holds: the larger of its prompts' pass and its last step.

    Args:
        rows: responses that are decoded at once.
        prompt, longest: most tokens of a prompt, and of it with its response.
        weight_bytes: of a number of weights and cache.
    """
    cache_a_token = weight_bytes * shape.kv_elements
    prefill = passing_bytes(shape, Tokens(rows * prompt, prompt, weight_bytes)) + rows * prompt * cache_a_token
    # A layer's cache grows by being copied. Probabilities are added up in float64.
    copied = rows * longest * cache_a_token // shape.layers
    drawing = rows * shape.vocabulary * (weight_bytes + FLOAT + 2 * _DOUBLE)
    return max(prefill, rows * longest * cache_a_token + max(copied, drawing))


def _layer_bytes(shape: ModelShape, over: Tokens) -> int:
    """Bytes a token that one layer keeps."""
    weight = over.weight_bytes
    norms = _NORMS.get(shape.family, 2) * _norm_bytes(shape, weight)
    if shape.family in _HEAD_NORMS:
        wide = FLOAT if shape.family in _GEMMAS else weight
        norms += (FLOAT + wide) * (shape.queries + shape.keys)
    attention = weight * (3 * shape.queries + 2 * shape.keys) + _square_bytes(shape, over, False)
    feed_forward = weight * _WIDE_ROWS.get(shape.family, _GATED_WIDE_ROWS) * shape.intermediate
    return norms + attention + feed_forward


def _norm_bytes(shape: ModelShape, weight: int) -> int:
    """Bytes a token of one norm, with the input of what follows it: its own input and its result, and between them
    what it made in float32."""
    if shape.family in _LAYER_NORM:
        return 2 * weight * shape.hidden
    between = FLOAT if shape.family in _GEMMAS else weight
    return (FLOAT + between + weight) * shape.hidden


def _square_bytes(shape: ModelShape, over: Tokens, passing: bool) -> int:
    """Bytes a token of what grows with the length of its row: a mask in the weights' precision for the fused kernel;
    or for each head the capped scores and their softmax, of which one is float32."""
    if shape.caps_scores:
        more = over.weight_bytes if passing else 0
        return over.longest * shape.heads * (2 * FLOAT + more)
    return 0 if over.packed else over.longest * over.weight_bytes
