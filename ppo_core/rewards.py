"""Per-token rewards: the KL penalty on every response token, the score on the last one.

The score arrives as a number per row: how it was made, normalised or corrected is not known here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_core.errors import ShapeError
from ppo_core.masked import at_least_float32, real_tokens


def kl_penalty(old_logprobs: Tensor, ref_logprobs: Tensor, estimator: str = "k1") -> Tensor:
    """Per-token estimate of KL(policy || reference) from the logprobs of the sampled tokens.

    With d = old - ref: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. k1 is unbiased and may be negative; k2 and k3 never
    are. Nothing is clamped.

    Args:
        old_logprobs: [B, T], nats.
        ref_logprobs: [B, T], nats.
        estimator: "k1", "k2" or "k3".

    Returns:
        [B, T], nats; float64 if one input is, otherwise float32.

    Raises:
        ShapeError: the two differ in shape.
        ValueError: another estimator.

    Source: J. Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html.
    """
    if old_logprobs.shape != ref_logprobs.shape:
        raise ShapeError(f"old_logprobs has shape {list(old_logprobs.shape)}, ref_logprobs {list(ref_logprobs.shape)}")
    difference = at_least_float32(old_logprobs) - at_least_float32(ref_logprobs)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        # expm1 and not exp - 1: near d = 0 the result is d^2 / 2, which exp - 1 loses to rounding.
        return torch.expm1(-difference) + difference
    raise ValueError(f"KL estimator {estimator!r} is unknown: k1, k2 or k3")


def per_token_rewards(
    scores: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    kl_coef: float | Tensor,
    estimator: str = "k1",
    missing_eos: Tensor | None = None,
    missing_eos_penalty: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """-kl_coef * kl on every response token, plus the row's score on its last one.

    The last response token is found from the mask, so an answer that ends early is paid there and not in the last
    column. An empty response gets nothing anywhere: its score is dropped.

    Args:
        scores: [B], reward-model units; the score of an empty row is ignored.
        old_logprobs: [B, T], nats; entries outside the mask are ignored.
        ref_logprobs: [B, T], nats; entries outside the mask are ignored.
        mask: [B, T] bool or 0/1, True on response tokens.
        kl_coef: weight of the KL, reward-model units per nat.
        estimator: see `kl_penalty`.
        missing_eos: [B] bool, True where the answer was cut off; None means that none was.
        missing_eos_penalty: added (so a negative number) to the score of those rows, reward-model units.

    Returns:
        rewards and kl, [B, T] each, in the dtype of the logprobs, 0 where masked.

    Raises:
        ShapeError: the shapes do not fit.
        ValueError: an unknown estimator.

    Example: score 1, kl .5 .5 .5, kl_coef .1, mask 1 1 0 give rewards -.05 .95 0.
    Source: Ouyang et al. 2022, arXiv:2203.02155, section 3.5; huggingface/trl#1893 for the place of the score.
    """
    real, old, ref = real_tokens(mask, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs)
    if real.dim() != 2:
        raise ShapeError(f"mask has shape {list(real.shape)}, expected [B, T]")
    for name, per_row in (("scores", scores), ("missing_eos", missing_eos)):
        if per_row is not None and per_row.shape != real.shape[:1]:
            raise ShapeError(f"{name} has shape {list(per_row.shape)}, expected [{real.shape[0]}]")
    kl = kl_penalty(old, ref, estimator)
    final_scores = scores.to(kl.dtype)
    if missing_eos is not None:
        final_scores = torch.where(missing_eos.bool(), final_scores + missing_eos_penalty, final_scores)
    # A token is the last one where no real token follows it in its row.
    is_last = real & (real.flip(1).cumsum(dim=1).flip(1) == 1)
    rewards = torch.where(is_last, final_scores.unsqueeze(1) - kl_coef * kl, -kl_coef * kl)
    return torch.where(real, rewards, 0.0), kl
