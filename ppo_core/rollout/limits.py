"""What keeps tokens from being drawn (top-p, top-k, a minimum length), and the record of what could be drawn.

The record travels with the response: see `ppo_core.models.token_sets` for why. It knows logits, no models.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_core.models.token_sets import TokenSets
from ppo_core.rollout.sampling import drawable_tokens
from ppo_core.spec.groups import RolloutConfig


class SamplingLimits:
    """The limits of one generation, of `num_rows` responses. A spec without limits leaves everything as it is."""

    def __init__(self, config: RolloutConfig, stop_ids: list[int], num_rows: int) -> None:
        self._config = config
        self._stop_ids = stop_ids
        self._cuts = config.top_p < 1 or config.top_k > 0
        self._sets: list[list[Tensor]] = [[] for _ in range(num_rows)]

    def limited(self, logits: Tensor, rows: Tensor, step: int) -> Tensor:
        """Logits [b, V] of the rows [b] with -inf for what token `step` of their responses must not be; recorded."""
        config = self._config
        if not config.limits_sampling:
            return logits
        vocabulary = logits.shape[1]
        ends = self._stop_ids if step < config.min_new_tokens else []
        ends = [token for token in ends if token < vocabulary]
        forbidden = torch.tensor(ends, dtype=torch.long, device=logits.device)
        if not self._cuts:
            same = forbidden.int().cpu()
            for row in rows.tolist():
                self._sets[row].append(same)
            return logits.index_fill(1, forbidden, -torch.inf)
        drawable = drawable_tokens(logits, config.temperature, config.top_p, config.top_k, forbidden)
        ids = drawable.nonzero()[:, 1].int().cpu()
        first = 0
        for row, count in zip(rows.tolist(), drawable.sum(dim=1).tolist(), strict=True):
            self._sets[row].append(ids[first : first + count])
            first += count
        return logits.masked_fill(~drawable, -torch.inf)

    def token_sets(self, row: int, length: int) -> TokenSets | None:
        """What could be drawn for each of a response's `length` tokens; None without limits."""
        if not self._config.limits_sampling:
            return None
        sets = self._sets[row][:length]
        return TokenSets(
            ids=torch.cat([torch.zeros(0, dtype=torch.int32), *sets]),
            counts=torch.tensor([len(one) for one in sets], dtype=torch.long),
            listed="drawable" if self._cuts else "forbidden",
        )
