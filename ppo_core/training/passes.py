"""The no-grad passes over a whole rollout, before its first update: the trainer's own numbers, never the engine's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_core.models.policy import PolicyModel
from ppo_core.ranks import ALONE, Ranks
from ppo_core.rollout.batch import Rollout
from ppo_core.spec import RunSpec
from ppo_core.training.engine import PassSettings, TrainEngine
from ppo_core.training.microbatches import Microbatch, plan_with_at_least


@dataclass(frozen=True)
class OldPass:
    """What the policy says of its own rollout: `logprobs`, `values` [B, T], 0 where masked, and how it was computed.

    `plan` are the microbatches of this pass. The reference's pass takes the same ones, and in bfloat16 the update, too.
    """

    logprobs: Tensor
    values: Tensor
    plan: tuple[Microbatch, ...]
    settings: PassSettings


@torch.no_grad()
def forward_policy(
    trainer: TrainEngine, rollout: Rollout, spec: RunSpec, check: Callable[[], None], ranks: Ranks = ALONE
) -> OldPass:
    """Old logprobs and values, with the update's own microbatch rule, kernel, precision and mode.

    Each rank computes its microbatches; all of them get the whole.
    """
    logprobs = torch.zeros(rollout.response_mask.shape)
    values = torch.zeros_like(logprobs)
    # A plan that the update keeps needs a part for each of its steps.
    parts = spec.update.minibatches if spec.policy.dtype == "bfloat16" else 1
    plan = plan_with_at_least(parts, rollout, spec.update.token_budget, spec.update.row_layout, ranks.size)
    for batch in ranks.mine(plan):
        check()
        output = trainer.forward(batch, entropy="none")
        # Added, not set: one without tokens names a row that another microbatch has the tokens of.
        logprobs[batch.rows, batch.grid] += output.logprobs.to(logprobs.device)
        values[batch.rows, batch.grid] += output.values.to(values.device)
    return OldPass(ranks.add(logprobs), ranks.add(values), plan, trainer.pass_settings())


@torch.no_grad()
def forward_logprobs(
    reference: PolicyModel,
    rollout: Rollout,
    plan: tuple[Microbatch, ...],
    spec: RunSpec,
    check: Callable[[], None],
    ranks: Ranks = ALONE,
) -> Tensor:
    """The reference's logprobs [B, T] of the sampled tokens, at the sampling temperature, 0 where masked.

    In the old pass's own microbatches: where both are the same model, their KL is 0 to the last bit.
    """
    logprobs = torch.zeros(rollout.response_mask.shape)
    for batch in ranks.mine(plan):
        check()
        found = reference.logprobs(
            batch.input_ids,
            batch.attention_mask,
            batch.mask,
            temperature=spec.rollout.temperature,
            token_sets=batch.token_sets,
        )
        logprobs[batch.rows, batch.grid] += found.to(logprobs.device)
    return ranks.add(logprobs)
