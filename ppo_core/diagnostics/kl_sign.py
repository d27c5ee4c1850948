"""Whether the measured KL to the reference is negative beyond chance: then it is no KL, and the penalty pays for drift.

It knows logprobs, not where they come from.
"""

from __future__ import annotations

import math

from torch import Tensor

from ppo_core.masked import masked_mean, masked_std
from ppo_core.rewards import kl_penalty

# Of a KL near 0 the mean of k1 is below zero by chance; by three standard errors once in 700 iterations at most.
STANDARD_ERRORS = 3.0


def negative_kl_warning(old_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> str | None:
    """What to tell people when the mean of k1 lies below zero by more than chance; None when it does not.

    Args:
        old_logprobs, ref_logprobs: [B, T], nats; entries outside the mask are ignored.
        mask: [B, T] bool, True on response tokens.

    Source: huggingface/trl#235, a forbidden end made the KL negative and the text fell apart.
    """
    k1 = kl_penalty(old_logprobs, ref_logprobs, "k1")
    num_tokens = int(mask.count_nonzero())
    if num_tokens < 2:
        return None
    mean, error = float(masked_mean(k1, mask)), float(masked_std(k1, mask)) / math.sqrt(num_tokens)
    if mean >= -STANDARD_ERRORS * error:
        return None
    return (
        f"negative KL: kl/ref_token is {mean:.3g} nats (standard error {error:.2g}), which no KL can be: the penalty "
        "pays for leaving the reference, since responses are not drawn from the distribution that logprobs are of; "
        "look at rollout/engine_gap_mean and the sampling settings"
    )
