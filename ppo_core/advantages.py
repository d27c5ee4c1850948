"""Generalised advantage estimation along the response tokens of each row. It does not know what made the rewards."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_core.errors import ShapeError
from ppo_core.masked import real_tokens


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 0.95) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and returns, per response token.

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t     = delta_t + gamma * lam * A_{t+1}

    t + 1 is the row's next response token, also where masked positions lie between the two. The episode ends at the
    row's last response token: V and A beyond it count as 0. Not whitened: see `masked_whiten`.

    Args:
        rewards: [B, T] float32 or float64, reward-model units; entries outside the mask are ignored.
        values: [B, T], same units; entries outside the mask are ignored.
        mask: [B, T] bool or 0/1, True on response tokens.
        gamma: discount per token, in [0, 1]; 1 is usual for language models.
        lam: trace decay per token, in [0, 1]; at 1 the returns are the discounted rewards to go.

    Returns:
        advantages and returns (advantages + values), [B, T] each, dtype kept, 0 where masked.

    Raises:
        ShapeError: the three tensors differ in shape, or are not [B, T].

    Example: rewards 0 0 1, values .5 .5 .5, gamma 1, lam .5 give advantages .125 .25 .5 and returns .625 .75 1.
    Source: Schulman et al. 2015, arXiv:1506.02438, section 3.
    """
    real, real_rewards, real_values = real_tokens(mask, rewards=rewards, values=values)
    if real.dim() != 2:
        raise ShapeError(f"mask has shape {list(real.shape)}, expected [B, T]")
    # float64 within, for the recursion adds up as many roundings as the response has tokens.
    wide_values = real_values.double()
    delta = torch.where(real, real_rewards.double() + gamma * _next_real(wide_values, real) - wide_values, 0.0)
    # At a masked position the recursion hands A on as it is (delta 0, decay 1), and so steps over gaps.
    decay = torch.where(real, gamma * lam, torch.ones_like(delta))
    advantage = delta.new_zeros(delta.shape[0])
    backwards = []
    for delta_t, decay_t in zip(reversed(delta.unbind(1)), reversed(decay.unbind(1)), strict=True):
        advantage = torch.addcmul(delta_t, decay_t, advantage)
        backwards.append(advantage)
    stacked = torch.stack(backwards[::-1], dim=1) if backwards else delta
    advantages = torch.where(real, stacked, 0.0)
    returns = torch.where(real, advantages + wide_values, 0.0)
    return advantages.to(real_values.dtype), returns.to(real_values.dtype)


def _next_real(values: Tensor, real: Tensor) -> Tensor:
    """[B, T]: the value at the row's next real position after t, 0 where there is none."""
    num_positions = real.shape[1]
    positions = torch.arange(num_positions, device=real.device).expand_as(real)
    # nearest[t] is the first real position at or after t; column T stands for "none", where the value is 0.
    candidates = torch.nn.functional.pad(torch.where(real, positions, num_positions), (0, 1), value=num_positions)
    nearest = candidates.flip(1).cummin(dim=1).values.flip(1)
    return torch.nn.functional.pad(values, (0, 1)).gather(1, nearest[:, 1:])
