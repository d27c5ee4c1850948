"""The no-grad passes over a whole rollout, before its first update: the trainer's own numbers, never the engine's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_core.models.policy import PolicyModel
from ppo_core.rollout.batch import Rollout
from ppo_core.spec import RunSpec
from ppo_core.training.engine import PassSettings, TrainEngine
from ppo_core.training.microbatches import microbatches


@dataclass(frozen=True)
class OldPass:
    """What the policy says of its own rollout: `logprobs`, `values` [B, T], 0 where masked, and how it was computed."""

    logprobs: Tensor
    values: Tensor
    settings: PassSettings


@torch.no_grad()
def forward_policy(trainer: TrainEngine, rollout: Rollout, spec: RunSpec, check: Callable[[], None]) -> OldPass:
    """Old logprobs and values, with the update's own microbatch rule, kernel, precision and mode."""
    logprobs = torch.zeros(rollout.response_mask.shape)
    values = torch.zeros_like(logprobs)
    for batch in microbatches(rollout, torch.arange(rollout.num_rows), spec.update.token_budget):
        check()
        output = trainer.forward(batch, entropy="none")
        width = batch.mask.shape[1]
        logprobs[batch.rows, :width] = output.logprobs
        values[batch.rows, :width] = output.values
    return OldPass(logprobs, values, trainer.pass_settings())


@torch.no_grad()
def forward_logprobs(reference: PolicyModel, rollout: Rollout, spec: RunSpec, check: Callable[[], None]) -> Tensor:
    """The reference's logprobs [B, T] of the sampled tokens, at the sampling temperature, 0 where masked."""
    logprobs = torch.zeros(rollout.response_mask.shape)
    for batch in microbatches(rollout, torch.arange(rollout.num_rows), spec.update.token_budget):
        check()
        logprobs[batch.rows, : batch.mask.shape[1]] = reference.logprobs(
            batch.input_ids, batch.attention_mask, batch.mask, temperature=spec.rollout.temperature
        )
    return logprobs
