"""The losses of one PPO update and what is measured beside them: clipped policy loss, clipped value loss, entropy.

A loss is a sum over real tokens divided by `num_tokens`. Give every micro-batch of an optimizer step, on every rank,
the step's whole token count: the losses and gradients then add up to those of one big batch, however it was cut. The
statistics hold sums and counts for the same reason: `+` joins those of micro-batches, `over_ranks` those of ranks.
Nothing here knows of models or optimizers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from ppo_core.alignment import on_grid
from ppo_core.errors import ShapeError
from ppo_core.masked import all_reduced, at_least_float32, masked_max, real_tokens

# exp(20) is 5e8: far outside every clip range, far inside float32.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class PolicyStats:
    """What one policy loss saw, as float64 scalars without gradient on the loss's device; `a + b` is both batches.

    Reading a scalar waits for the device, adding does not. Shares and means are 0 where there was no real token.
    """

    num_tokens: Tensor  #: real tokens
    ratio_sum: Tensor  #: sum of exp(logprobs - old_logprobs)
    ratio_max: Tensor  #: its largest value, 0 without a token
    max_ratio_deviation: Tensor  #: largest |ratio - 1|: 0 before the first optimizer step, if both passes agree
    approx_kl_sum: Tensor  #: sum of expm1(d) - d, d the log-ratio; nats
    num_clipped: Tensor  #: tokens with |ratio - 1| > clip_range
    num_clipped_active: Tensor  #: tokens whose loss is the clipped branch's
    num_log_ratio_clamped: Tensor  #: tokens whose log-ratio was beyond +-20

    @property
    def ratio_mean(self) -> Tensor:
        """Mean ratio; stays near 1 in a healthy update."""
        return _share(self.ratio_sum, self.num_tokens)

    @property
    def approx_kl(self) -> Tensor:
        """KL(old policy || new policy) by the k3 estimator, nats per token, never negative."""
        return _share(self.approx_kl_sum, self.num_tokens)

    @property
    def clip_fraction(self) -> Tensor:
        """Share of tokens with |ratio - 1| > clip_range, whatever the sign of their advantage."""
        return _share(self.num_clipped, self.num_tokens)

    @property
    def clip_fraction_active(self) -> Tensor:
        """Share of tokens whose loss is the clipped branch's, and which therefore have no gradient."""
        return _share(self.num_clipped_active, self.num_tokens)

    def __add__(self, other: PolicyStats) -> PolicyStats:
        return PolicyStats(
            num_tokens=self.num_tokens + other.num_tokens,
            ratio_sum=self.ratio_sum + other.ratio_sum,
            ratio_max=torch.maximum(self.ratio_max, other.ratio_max),
            max_ratio_deviation=torch.maximum(self.max_ratio_deviation, other.max_ratio_deviation),
            approx_kl_sum=self.approx_kl_sum + other.approx_kl_sum,
            num_clipped=self.num_clipped + other.num_clipped,
            num_clipped_active=self.num_clipped_active + other.num_clipped_active,
            num_log_ratio_clamped=self.num_log_ratio_clamped + other.num_log_ratio_clamped,
        )

    def over_ranks(self, group: ProcessGroup | None) -> PolicyStats:
        """The statistics of all ranks of the group together; every rank must call it."""
        maxima = ("ratio_max", "max_ratio_deviation")
        ops = {field.name: ReduceOp.MAX if field.name in maxima else ReduceOp.SUM for field in fields(self)}
        return PolicyStats(**{name: all_reduced(getattr(self, name), group, op) for name, op in ops.items()})


@dataclass(frozen=True)
class ValueStats:
    """What one value loss saw, as float64 scalars without gradient; `a + b` is both batches."""

    num_tokens: Tensor  #: real tokens
    num_clipped: Tensor  #: tokens whose loss is the clipped branch's

    @property
    def clip_fraction(self) -> Tensor:
        """Share of tokens whose loss is the clipped branch's; 0 with the clip switched off."""
        return _share(self.num_clipped, self.num_tokens)

    def __add__(self, other: ValueStats) -> ValueStats:
        return ValueStats(self.num_tokens + other.num_tokens, self.num_clipped + other.num_clipped)

    def over_ranks(self, group: ProcessGroup | None) -> ValueStats:
        """The statistics of all ranks of the group together; every rank must call it."""
        return ValueStats(all_reduced(self.num_tokens, group), all_reduced(self.num_clipped, group))


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_range: float = 0.2,
    num_tokens: float | Tensor | None = None,
) -> tuple[Tensor, PolicyStats]:
    """PPO's clipped surrogate: sum over real tokens of max(-A r, -A clip(r, 1 - eps, 1 + eps)) / num_tokens.

    r = exp(logprobs - old_logprobs), with the log-ratio clamped at +-20; tokens beyond that have no gradient and are
    counted. old_logprobs and advantages are constants.

    Args:
        logprobs: [B, T], nats, with gradient; entries outside the mask are ignored, as in all inputs.
        old_logprobs: [B, T], nats, by the trainer before the first update.
        advantages: [B, T], usually whitened.
        mask: [B, T] bool or 0/1, True on response tokens.
        clip_range: eps, > 0.
        num_tokens: divisor; default this batch's real tokens. See the module's head.

    Returns:
        loss, a scalar in the inputs' dtype (0 with a zero gradient where no token is real), and its statistics.

    Raises:
        ShapeError: the tensors differ in shape.

    Example: old 0 0, new ln 1.5 twice, A 1 -1, eps .2 give (-1.2 + 1.5) / 2 = .15.
    Source: Schulman et al. 2017, arXiv:1707.06347, equation 7.
    """
    real, new, old, advantage = real_tokens(
        mask, logprobs=logprobs, old_logprobs=old_logprobs.detach(), advantages=advantages.detach()
    )
    raw_log_ratio = new - old
    log_ratio = raw_log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    unclipped = -advantage * ratio
    clipped = -advantage * ratio.clamp(1 - clip_range, 1 + clip_range)
    loss = _token_sum(torch.maximum(unclipped, clipped), real, num_tokens)
    with torch.no_grad():
        # In float64: before the first step d is about 1e-7, and expm1(d) - d far below float32's rounding of d.
        d = log_ratio.double()
        stats = PolicyStats(
            num_tokens=_count(real),
            ratio_sum=torch.where(real, d.exp(), 0.0).sum(),
            ratio_max=masked_max(d.exp(), real),
            max_ratio_deviation=masked_max(torch.expm1(d).abs(), real),
            approx_kl_sum=(torch.expm1(d) - d).sum(),
            num_clipped=_count(real & ((ratio - 1).abs() > clip_range)),
            num_clipped_active=_count(real & (clipped > unclipped)),
            num_log_ratio_clamped=_count(real & (raw_log_ratio.abs() > MAX_LOG_RATIO)),
        )
    return loss, stats


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip_range: float | None = 0.2,
    num_tokens: float | Tensor | None = None,
) -> tuple[Tensor, ValueStats]:
    """Half the squared error of the values, or of the clipped values where that is larger, summed / num_tokens.

    max((v - R)^2, (v_old + clip(v - v_old, -eps, eps) - R)^2) / 2 per real token; old_values and returns are constants.

    Args:
        values: [B, T], reward-model units, with gradient; entries outside the mask are ignored, as in all inputs.
        old_values: [B, T], same units, from before the first update.
        returns: [B, T], same units.
        mask: [B, T] bool or 0/1, True on response tokens.
        clip_range: eps, reward-model units; None switches the clip off.
        num_tokens: divisor; default this batch's real tokens. See the module's head.

    Returns:
        loss, a scalar in the inputs' dtype (0 with a zero gradient where no token is real), and its statistics.

    Raises:
        ShapeError: the tensors differ in shape.

    Example: v 1, v_old 0, R 1, eps .2 give (.2 - 1)^2 / 2 = .32, with the clip off 0.
    Source: openai/baselines: baselines/ppo2/model.py.
    """
    real, new, old, target = real_tokens(mask, values=values, old_values=old_values.detach(), returns=returns.detach())
    squared_error = (new - target).square()
    if clip_range is None:
        clipped_error = squared_error
    else:
        # v itself within the range: old + (v - old) would round, and count tokens as clipped that are not.
        clipped_error = (new.clamp(old - clip_range, old + clip_range) - target).square()
    loss = _token_sum(torch.maximum(squared_error, clipped_error) / 2, real, num_tokens)
    return loss, ValueStats(_count(real), _count(real & (clipped_error > squared_error)))


def entropy(logits: Tensor, mask: Tensor, temperature: float = 1.0, num_tokens: float | Tensor | None = None) -> Tensor:
    """Entropy of the distribution that each response token was sampled from, summed over real tokens / num_tokens.

    Only the logits of real tokens are copied and read.

    Args:
        logits: [B, L, V], any floating type; -inf is legal (a token that cannot be drawn), also for the gradient.
        mask: [B, T] bool or 0/1, True on response tokens.
        temperature: the sampling temperature, > 0.
        num_tokens: divisor; default this batch's real tokens. See the module's head.

    Returns:
        Scalar, nats per token, float32 or float64 as the logits; 0 with a zero gradient where no token is real.

    Raises:
        ShapeError: the mask is not [B, T] of the logits' [B, L, V].
    """
    if logits.dim() != 3 or on_grid(logits).shape[:2] != mask.shape:
        raise ShapeError(
            f"logits have shape {list(logits.shape)}, mask {list(mask.shape)}: expected [B, L, V] and [B, L - 1]"
        )
    real = mask.bool()
    per_token = token_entropies(on_grid(logits)[real], temperature)
    return _token_sum(per_token, torch.ones_like(per_token, dtype=torch.bool), num_tokens)


def token_entropies(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy of softmax(logits / temperature) at each of any selection of positions: [..., V] to [...], nats.

    float32, or float64 where the logits are. -inf logits have probability 0 and take no part, forward or backward.
    """
    wide = at_least_float32(logits)
    logprobs = (wide if temperature == 1.0 else wide / temperature).log_softmax(dim=-1)
    # The limit of p log p at p = 0 is 0, but 0 * -inf is NaN: take -inf out before the product.
    finite = logprobs.masked_fill(torch.isneginf(logprobs), 0.0)
    return -(logprobs.exp() * finite).sum(dim=-1)


def _token_sum(per_token: Tensor, real: Tensor, num_tokens: float | Tensor | None) -> Tensor:
    """Sum over real tokens / num_tokens, added up in float64, in the dtype of `per_token`; 0 tokens give 0."""
    total = torch.where(real, per_token, 0.0).sum(dtype=torch.float64)
    if num_tokens is None:
        num_tokens = _count(real)
    divisor = torch.as_tensor(num_tokens, dtype=torch.float64, device=real.device)
    return (total / torch.where(divisor == 0, 1.0, divisor)).to(per_token.dtype)


def _count(which: Tensor) -> Tensor:
    return which.sum(dtype=torch.float64)


def _share(total: Tensor, count: Tensor) -> Tensor:
    return total / count.clamp(min=1)
