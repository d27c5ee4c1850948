"""How the KL coefficient moves from one iteration to the next: not at all, or towards a target KL.

The adaptive controller is proportional: it compares the KL to the reference of one iteration's responses with the
target and multiplies the coefficient, a little at a time. It knows neither rewards nor checkpoints; all that it carries
from one iteration to the next is the coefficient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ppo_core.masked import masked_mean, masked_row_sum
from ppo_core.rewards import kl_penalty
from ppo_core.spec import RunSpec
from ppo_core.spec.groups import ADAPTIVE_KL_COEF, MAX_KL_ERROR, KLConfig


@dataclass(frozen=True)
class KLUpdate:
    """What an iteration's KL does to the coefficient."""

    error: float | None  #: (KL - target) / target, not clipped; None with a fixed coefficient
    coef: float  #: of the next iteration, score a nat


def update_kl_coef(
    coef: float, old_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, iteration: int, spec: RunSpec
) -> KLUpdate:
    """The coefficient of the next iteration, from the KL a response that this one's rollout has.

    The KL is `kl/ref_sequence`: the sum of old - ref logprobs (k1) over a response, averaged over responses, whatever
    estimator the penalty uses. While the critic warms up the policy cannot answer, so the coefficient stays.

    Args:
        coef: the coefficient of this iteration, score a nat.
        old_logprobs: [B, T], nats; entries outside the mask are ignored.
        ref_logprobs: [B, T], nats; entries outside the mask are ignored.
        mask: [B, T] bool or 0/1, True on response tokens.
        iteration: number of this iteration, from 1.
        spec: the run's.
    """
    target, horizon = spec.kl.target, spec.kl.horizon
    if spec.kl.controller == "fixed" or target is None or horizon is None:
        return KLUpdate(None, coef)
    sequence_kl = masked_row_sum(kl_penalty(old_logprobs, ref_logprobs, "k1"), mask)
    error = (float(masked_mean(sequence_kl, mask.new_ones(mask.shape[0]))) - target) / target
    if iteration <= spec.update.critic_warmup_iterations:
        return KLUpdate(error, coef)
    return KLUpdate(error, adapted_coef(coef, error, mask.shape[0], horizon))


def adapted_coef(coef: float, error: float, num_responses: int, horizon: int) -> float:
    """coef * (1 + clip(error, -0.2, 0.2) * num_responses / horizon), within the bounds of `ADAPTIVE_KL_COEF`.

    An error that is not finite leaves the coefficient as it is.

    Example: coef .1, error 1, 64 responses, horizon 640 give .102.
    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2, whose fixed gain .1 a batch is here
    num_responses / horizon, so that the pace does not depend on the batch size.
    """
    if not math.isfinite(error):
        return coef
    low, high = ADAPTIVE_KL_COEF
    clipped = min(max(error, -MAX_KL_ERROR), MAX_KL_ERROR)
    return min(max(coef * (1 + clipped * num_responses / horizon), low), high)


def coef_to_start_from(kept: float, kept_spec: Mapping[str, Any], kl: KLConfig) -> float:
    """The coefficient of a run that goes on from a checkpoint.

    An adaptive controller goes on with the coefficient that the checkpoint holds, unless kl.coef is another than in the
    spec that the checkpoint was written under: then somebody changed it, and the new value is taken.

    Args:
        kept: the checkpoint's coefficient.
        kept_spec: the spec that the checkpoint was written under, as it was stored.
        kl: the KL group of the spec that goes on.
    """
    if kl.controller == "fixed" or kept_spec["kl"]["coef"] != kl.coef:
        return kl.coef
    return kept
