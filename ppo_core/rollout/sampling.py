"""Drawing tokens: every row has its own stream of uniform numbers, turned into tokens by the inverse distribution."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def uniform_draws(seeds: list[int], num_draws: int) -> Tensor:
    """[B, num_draws] float64 in [0, 1): row i's numbers come from a counter-based stream of seeds[i] alone."""
    draws = np.empty((len(seeds), num_draws))
    for row, seed in enumerate(seeds):
        draws[row] = np.random.Generator(np.random.Philox(key=seed)).random(num_draws)
    return torch.from_numpy(draws)


def sample_tokens(logits: Tensor, temperature: float, draws: Tensor) -> tuple[Tensor, Tensor]:
    """The token of each row where the cumulative softmax(logits / temperature) passes the row's draw.

    The distribution is the float32 softmax, added up in float64: nothing is cut off, and a token of probability 0 is
    never drawn.

    Args:
        logits: [B, V], any floating type; -inf is legal.
        temperature: > 0.
        draws: [B] float64 in [0, 1).

    Returns:
        tokens [B] int64, and their logprobs [B] float32, nats.
    """
    probabilities = (logits.float() / temperature).softmax(dim=-1)
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Rounding may lift draw * total to the total itself, beyond the last token.
    below_total = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(draws.unsqueeze(1) * total, below_total)
    # NaN logits find no place: their token is the last one and its logprob NaN, for the caller to see.
    tokens = torch.searchsorted(cumulative, target, right=True).clamp(max=logits.shape[1] - 1)
    return tokens.squeeze(1), probabilities.gather(1, tokens).squeeze(1).log()


def drawable_tokens(logits: Tensor, temperature: float, top_p: float, top_k: int, forbidden: Tensor) -> Tensor:
    """Which tokens each row may draw, by the usual order of limits: forbidden ids, temperature, top-k, top-p.

    At least one a row. Of equally likely tokens the lower id comes first.

    Args:
        logits: [B, V], any floating type; -inf is legal.
        temperature: > 0.
        top_p: in (0, 1]: the fewest likeliest tokens whose probabilities add up to this or more; 1 keeps all.
        top_k: the so many likeliest tokens; 0 keeps all.
        forbidden: [n] int64, ids that no row may draw; n may be 0.

    Returns:
        [B, V] bool.

    Example: probabilities .5 .3 .2 and top_p .7 keep the first two; with id 0 forbidden .6 .4 are left, and both stay.
    Source: Holtzman et al. 2020, arXiv:1904.09751, for top-p.
    """
    allowed = logits.float().index_fill(1, forbidden, -torch.inf) / temperature
    ordered, order = allowed.sort(dim=-1, descending=True, stable=True)
    if top_k:
        ordered = ordered.clone()
        ordered[:, top_k:] = -torch.inf
    probabilities = ordered.softmax(dim=-1, dtype=torch.float64)
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = ordered > -torch.inf
    if top_p < 1:
        kept &= before < top_p
    return torch.zeros_like(kept).scatter(1, order, kept)
