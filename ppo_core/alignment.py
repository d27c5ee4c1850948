"""From token columns to the shifted grid: which token each prediction is about, its logprob, and which are responses.

A padded row has L columns; grid position t, 0 to T - 1 with T = L - 1, is about the token at column t + 1, which the
model predicts in column t. Nothing outside this module slices columns by hand. It does not know how the tokens were
made, and it never searches them for an id: lengths are the rollout engine's word.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_core.errors import AlignmentError, ShapeError
from ppo_core.masked import at_least_float32


def on_grid(per_column: Tensor) -> Tensor:
    """[B, L, ...] to [B, T, ...]: what the model put out in column t, as the prediction about the token at t + 1.

    Hidden states, values and logits alike: the state that predicts a token is the one before it.
    """
    if per_column.dim() < 2:
        raise ShapeError(f"expected [B, L, ...], got {list(per_column.shape)}")
    return per_column[:, :-1]


def next_tokens(input_ids: Tensor) -> Tensor:
    """[B, L] to [B, T]: the token that each grid position is about."""
    if input_ids.dim() != 2:
        raise ShapeError(f"input_ids has shape {list(input_ids.shape)}, expected [B, L]")
    return input_ids[:, 1:]


def gathered_logprobs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at the given tokens, for any selection of grid positions.

    Args:
        logits: [..., V], any floating type; -inf is legal for tokens that cannot be drawn.
        tokens: [...] int64, the token to look up at each position.
        temperature: the sampling temperature, > 0.

    Returns:
        [...] float32, or float64 where the logits are; nats.

    Raises:
        ShapeError: tokens is not logits without its last axis.

    Example: logits 2 1 0, token 1, temperature 0.5 give -2.1429.
    """
    if logits.shape[:-1] != tokens.shape:
        raise ShapeError(f"logits of shape {list(logits.shape)} do not fit tokens of shape {list(tokens.shape)}")
    # The one copy of the logits. Centred on their largest, or logits around 1000 would cost three float32 digits;
    # the centre cancels, so it needs no gradient.
    wide = at_least_float32(logits)
    centred = (wide - wide.detach().amax(dim=-1, keepdim=True)).div_(temperature)
    chosen = centred.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return chosen - centred.logsumexp(dim=-1)


def token_logprobs(logits: Tensor, input_ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Logprob of every token of the batch but the first column's, under the distribution it was sampled from.

    Args:
        logits: [B, L, V], any floating type.
        input_ids: [B, L] int64.
        temperature: the sampling temperature, > 0: without it the logprobs are those of another distribution.

    Returns:
        [B, T] float32, or float64 where the logits are; nats. Entry t is about the token at column t + 1. Entries
        outside the response mask are rubbish.

    Raises:
        ShapeError: logits and input_ids do not share [B, L].

    Source: OpenRLHF/OpenRLHF#853, logprobs without the sampling temperature.
    """
    if logits.dim() != 3 or logits.shape[:2] != input_ids.shape:
        raise ShapeError(
            f"logits have shape {list(logits.shape)}, input_ids {list(input_ids.shape)}: expected [B, L, V] and [B, L]"
        )
    return gathered_logprobs(on_grid(logits), next_tokens(input_ids), temperature)


def response_mask(attention_mask: Tensor, response_start: Tensor, response_length: Tensor) -> Tensor:
    """True on the generated tokens of each row, the end-of-sequence token included, on the shifted grid.

    Prompts may be padded on the left, on the right or both; the response begins at its own column in each row. The
    attention mask must come from the recorded lengths. One made by comparing ids with the pad id drops the real
    end-of-sequence token wherever the two ids are the same, and is refused here.

    Args:
        attention_mask: [B, L] bool or 0/1, True on prompt and response tokens.
        response_start: [B] int, column of the first generated token.
        response_length: [B] int, number of generated tokens by the rollout engine's word; 0 is legal.

    Returns:
        [B, T] bool; a row's sum is its response_length.

    Raises:
        ShapeError: the three tensors do not share B.
        AlignmentError: a row's mask does not hold response_length tokens, or its response begins in column 0, where
            nothing predicts it. The message names the first such row.

    Example: attention 1 1 1 1 1 0 0, start 2, length 3 give 0 1 1 1 0 0.
    Source: huggingface/trl#5303, a padding id equal to the end-of-sequence id.
    """
    if attention_mask.dim() != 2:
        raise ShapeError(f"attention_mask has shape {list(attention_mask.shape)}, expected [B, L]")
    num_rows, num_columns = attention_mask.shape
    if response_start.shape != (num_rows,) or response_length.shape != (num_rows,):
        raise ShapeError(
            f"response_start has shape {list(response_start.shape)} and response_length {list(response_length.shape)}, "
            f"expected [{num_rows}] each"
        )
    columns = torch.arange(1, num_columns, device=attention_mask.device)
    mask = next_tokens(attention_mask.bool()) & (columns >= response_start.unsqueeze(1))
    counts = mask.sum(dim=1)
    wrong = (counts != response_length) | ((response_start < 1) & (response_length > 0))
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise AlignmentError(
            f"row {row}: {int(counts[row])} tokens are in the response mask from column {int(response_start[row])} on, "
            f"but {int(response_length[row])} were generated ({int(wrong.sum())} of {num_rows} rows are wrong)"
        )
    return mask
