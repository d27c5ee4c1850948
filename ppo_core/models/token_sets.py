"""Which tokens could be drawn at each position of a response, where sampling was limited to fewer than all.

Top-p, top-k and a minimum length change the distribution that responses come from. The sets are fixed when a token
is drawn and travel with the rollout; every later logprob and entropy is of the softmax over the very same set, so that
a ratio is 1 before any update and a KL is one between the two distributions that are compared. What decides the sets
is `ppo_core.rollout.sampling`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ppo_core.errors import ShapeError

# Whichever list is short: those that could be drawn (top-p, top-k), or those that could not (a minimum length alone).
Listed = Literal["drawable", "forbidden"]


@dataclass(frozen=True)
class TokenSets:
    """One set of ids for each of N tokens, one after the other."""

    ids: Tensor  #: [M] int32, the sets' ids end to end: a nucleus of a flat distribution is long
    counts: Tensor  #: [N] int64, how many of them belong to each token; sums to M
    listed: Listed

    def __len__(self) -> int:
        return len(self.counts)

    def part(self, start: int, stop: int) -> TokenSets:
        """The sets of tokens `start` to `stop`, the latter left out."""
        first = int(self.counts[:start].sum())
        counts = self.counts[start:stop]
        return TokenSets(self.ids[first : first + int(counts.sum())], counts, self.listed)

    def limit(self, logits: Tensor) -> Tensor:
        """Logits [N, V] with -inf for every id that could not be drawn; the others keep value and gradient.

        Raises:
            ShapeError: there are not as many rows of logits as tokens.
        """
        if logits.shape[0] != len(self):
            raise ShapeError(f"{len(self)} token sets do not fit logits of shape {list(logits.shape)}")
        rows = torch.arange(len(self), device=logits.device).repeat_interleave(self.counts.to(logits.device))
        named = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
        named[rows, self.ids.to(logits.device).long()] = True
        return logits.masked_fill(~named if self.listed == "drawable" else named, -torch.inf)


def joined(sets: Sequence[TokenSets]) -> TokenSets:
    """The tokens of several responses as one sequence; they were all listed the same way."""
    return TokenSets(torch.cat([one.ids for one in sets]), torch.cat([one.counts for one in sets]), sets[0].listed)
