"""A negative KL is told, and chance is not."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_core.diagnostics.kl_sign import negative_kl_warning

NUM_TOKENS = 1000


def warned(old: Tensor, ref: Tensor) -> str | None:
    return negative_kl_warning(old, ref, torch.ones_like(old, dtype=torch.bool))


def test_logprobs_over_all_tokens_where_the_end_was_forbidden_are_told() -> None:
    """T08: huggingface/trl#235. Ids 1 and 2 drawn at .6 and .4, but scored at .3 .2 and .4 .3: KL -0.335."""
    first = torch.arange(NUM_TOKENS).unsqueeze(0) < 600
    old, ref = torch.where(first, 0.3, 0.2).log(), torch.where(first, 0.4, 0.3).log()
    assert (warned(old, ref) or "").startswith("negative KL: kl/ref_token is -0.335 nats")
    renormalised = torch.where(first, 0.6, 0.4).log(), torch.where(first, 4 / 7, 3 / 7).log()
    assert warned(*renormalised) is None


def test_a_mean_below_zero_by_chance_is_no_warning() -> None:
    difference = torch.randn(1, NUM_TOKENS, generator=torch.Generator().manual_seed(2)) * 0.1
    centred = difference - difference.sum() / NUM_TOKENS
    nothing = torch.zeros(1, NUM_TOKENS)
    assert warned(centred - 0.008, nothing) is None  # The standard error is 0.0032.
    assert warned(centred - 0.011, nothing) is not None


def test_equal_policies_and_single_tokens_are_no_warning() -> None:
    nothing = torch.zeros(1, NUM_TOKENS)
    assert warned(nothing, nothing) is None
    assert negative_kl_warning(-torch.ones(1, 2), torch.zeros(1, 2), torch.tensor([[True, False]])) is None


def test_what_is_masked_has_no_say() -> None:
    old, mask = torch.zeros(1, 4), torch.tensor([[True, True, False, True]])
    old[0, 2] = torch.nan
    assert negative_kl_warning(old, torch.zeros(1, 4), mask) is None
