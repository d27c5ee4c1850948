"""How rows are dealt out: minibatches (optimizer steps) by a seeded permutation, microbatches by a token budget.

In float32 the rows of each epoch are permuted and dealt out anew. In bfloat16 the same weights and tokens give other
logprobs in a batch of another shape, so there the microbatches of the old-logprob pass are kept, and permuted whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_core.models.token_sets import TokenSets
from ppo_core.models.trunk import RowLayout
from ppo_core.rollout.batch import Rollout
from ppo_core.seeds import generator


@dataclass(frozen=True)
class Microbatch:
    """Rows of one forward pass, cut to the columns that one of them uses.

    `rows` [b] says which rows of the rollout they are, `first` which of its columns comes first; `input_ids`,
    `attention_mask` [b, l]; `mask` [b, l - 1] is the response mask on the shifted grid. `token_sets` are those of its
    tokens, row by row; None where all can be drawn.
    """

    rows: Tensor
    first: int
    input_ids: Tensor
    attention_mask: Tensor
    mask: Tensor
    token_sets: TokenSets | None = None

    @property
    def grid(self) -> slice:
        """The columns of the whole rollout's shifted grid that are this microbatch's."""
        return slice(self.first, self.first + self.mask.shape[1])

    def cut(self, per_token: Tensor) -> Tensor:
        """This microbatch's part [b, l - 1] of a per-token tensor [B, T] of the whole rollout."""
        return per_token[self.rows, self.grid]


def minibatch_rows(num_rows: int, num_minibatches: int, seed: int, iteration: int, epoch: int) -> list[Tensor]:
    """Every row once, in a seeded order, in `num_minibatches` parts whose sizes differ by at most one."""
    order = torch.randperm(num_rows, generator=generator(seed, "minibatches", iteration, epoch))
    return list(torch.tensor_split(order, num_minibatches))


def minibatches_of_microbatches(
    plan: Sequence[Microbatch], num_minibatches: int, seed: int, iteration: int, epoch: int
) -> list[list[Microbatch]]:
    """Every microbatch once, in a seeded order, in `num_minibatches` parts whose sizes differ by at most one."""
    order = minibatch_rows(len(plan), num_minibatches, seed, iteration, epoch)
    return [[plan[place] for place in places.tolist()] for places in order]


def microbatches(rollout: Rollout, rows: Tensor, token_budget: int, layout: RowLayout = "padded") -> list[Microbatch]:
    """Deal `rows` out into microbatches of at most `token_budget` tokens, padding included where the layout pads.

    Longest rows come first, so that rows of like length share a microbatch and little is padded, and the peak of
    memory comes at once. A row longer than the budget stands alone.
    """
    lengths = rollout.lengths[rows]
    by_length = rows[torch.argsort(lengths, descending=True, stable=True)]
    found: list[Microbatch] = []
    start = 0
    while start < len(by_length):
        longest = int(rollout.lengths[by_length[start]])
        if layout == "packed":
            fit = int((rollout.lengths[by_length[start:]].cumsum(0) <= token_budget).count_nonzero())
        else:
            fit = token_budget // longest
        some = by_length[start : start + max(1, fit)]
        found.append(_microbatch(rollout, some))
        start += len(some)
    return found


def _microbatch(rollout: Rollout, rows: Tensor) -> Microbatch:
    used = rollout.attention_mask[rows].any(dim=0).nonzero().flatten()
    first, end = int(used[0]), int(used[-1]) + 1
    return Microbatch(
        rows=rows,
        first=first,
        input_ids=rollout.input_ids[rows, first:end],
        attention_mask=rollout.attention_mask[rows, first:end],
        mask=rollout.response_mask[rows, first : end - 1],
        token_sets=rollout.token_sets_of(rows),
    )


def plan_with_at_least(
    num_parts: int, rollout: Rollout, token_budget: int, layout: RowLayout = "padded"
) -> tuple[Microbatch, ...]:
    """Microbatches of all rows, as many as `num_parts` or more if there are rows enough: the budget is halved till so.

    A plan that is kept for the update needs one for every optimizer step.
    """
    rows = torch.arange(rollout.num_rows)
    found = microbatches(rollout, rows, token_budget, layout)
    while len(found) < min(num_parts, rollout.num_rows):
        token_budget //= 2
        found = microbatches(rollout, rows, token_budget, layout)
    return tuple(found)
