"""How rows are dealt out: minibatches (optimizer steps) by a seeded permutation, microbatches by a token budget.

In float32 the rows of each epoch are permuted and dealt out anew. In bfloat16 the same weights and tokens give other
logprobs in a batch of another shape, so there the microbatches of the old-logprob pass are kept, and permuted whole.

With several ranks a list of microbatches goes round: the first is rank 0's, the next rank 1's, and so on. Every rank
knows the whole list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    plan: Sequence[Microbatch], num_minibatches: int, seed: int, iteration: int, epoch: int, num_ranks: int = 1
) -> list[list[Microbatch]]:
    """Every round once, in a seeded order, in `num_minibatches` parts whose sizes differ by at most one round."""
    rounds = [plan[start : start + num_ranks] for start in range(0, len(plan), num_ranks)]
    order = minibatch_rows(len(rounds), num_minibatches, seed, iteration, epoch)
    return [[part for place in places.tolist() for part in rounds[place]] for places in order]


def microbatches(
    rollout: Rollout, rows: Tensor, token_budget: int, layout: RowLayout = "padded", num_ranks: int = 1
) -> list[Microbatch]:
    """Deal `rows` out into microbatches of at most `token_budget` tokens, padding included where the layout pads.

    They come in rounds of one for each rank, so all ranks have equally many; where the rows do not suffice, a rank's
    part of the last round is without tokens, since it must still take part. Longest rows come first, and a round is
    dealt out row by row: rows of like length share a microbatch and little is padded, ranks have like work, and the
    peak of memory comes at once. A row longer than the budget stands alone.
    """
    lengths = rollout.lengths[rows]
    by_length = rows[torch.argsort(lengths, descending=True, stable=True)]
    found: list[Microbatch] = []
    start = 0
    while start < len(by_length):
        longest = int(rollout.lengths[by_length[start]])
        if layout == "packed":
            # The rank that gets the first row of every deal has the most tokens.
            fit = int((rollout.lengths[by_length[start::num_ranks]].cumsum(0) <= token_budget).count_nonzero())
        else:
            fit = token_budget // longest
        some = by_length[start : start + max(1, fit) * num_ranks]
        for rank in range(num_ranks):
            own = some[rank::num_ranks]
            found.append(_microbatch(rollout, own) if len(own) else _without_tokens(found[-1]))
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


def _without_tokens(like: Microbatch) -> Microbatch:
    """One row of another microbatch to go through the motions with: no token of it counts."""
    return replace(
        like,
        rows=like.rows[:1],
        input_ids=like.input_ids[:1],
        attention_mask=like.attention_mask[:1],
        mask=torch.zeros_like(like.mask[:1]),
        token_sets=None if like.token_sets is None else like.token_sets.part(0, 0),
    )


def plan_with_at_least(
    num_rounds: int, rollout: Rollout, token_budget: int, layout: RowLayout = "padded", num_ranks: int = 1
) -> tuple[Microbatch, ...]:
    """Microbatches of all rows, of `num_rounds` rounds or more if there are rows enough: the budget is halved till so.

    A plan that is kept for the update needs a round for every optimizer step.
    """
    rows = torch.arange(rollout.num_rows)
    found = microbatches(rollout, rows, token_budget, layout, num_ranks)
    while len(found) < min(num_rounds, rollout.num_rows // num_ranks) * num_ranks:
        token_budget //= 2
        found = microbatches(rollout, rows, token_budget, layout, num_ranks)
    return tuple(found)
