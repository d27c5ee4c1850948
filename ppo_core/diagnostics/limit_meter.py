"""How long an iteration's arithmetic would take at the speed that this machine was measured to have."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ppo_core.iteration import IterationReport
from ppo_core.limit import iteration_work, limit_seconds
from ppo_core.model_shape import ModelShape, model_shape
from ppo_core.models.loading import DTYPES
from ppo_core.spec import RunSpec
from ppo_core.spec.files import model_config
from ppo_core.training.calibrate import calibrate


@dataclass(frozen=True)
class LimitMeter:
    """`policy` is None for a family whose arithmetic is not counted: then there is no limit to show."""

    policy: ModelShape | None
    reward_models: tuple[ModelShape, ...]
    critic: ModelShape | None
    frozen: bool
    flops_per_s: float

    @classmethod
    def of(cls, spec: RunSpec, device: torch.device) -> LimitMeter:
        """Read the shapes of a spec's models, and measure the machine for a fraction of a second."""
        policy = model_shape(model_config(spec.policy.model))
        folders = [source.model for source in spec.reward.sources if source.model is not None]
        shapes = [model_shape(model_config(folder)) for folder in folders]
        critic = None
        if spec.policy.value_head == "separate":
            critic = model_shape(model_config(spec.policy.critic_model or spec.policy.model))
        dtype = DTYPES[spec.policy.dtype]
        speed = 0.0 if policy is None else calibrate(policy, device, dtype, rows=spec.update.token_budget)
        known = tuple(shape for shape in shapes if shape is not None)
        return cls(policy, known, critic, spec.policy.lora is not None, speed * spec.training.ranks)

    def limit_s(self, report: IterationReport) -> float | None:
        """Seconds of an iteration's real tokens at the measured speed; None where they are not counted."""
        if self.policy is None:
            return None
        rollout, update = report.sampled, report.update
        seen = sum(minibatch.num_tokens for minibatch in update.minibatches)
        once = float(report.rollout.response_mask.count_nonzero())
        work = iteration_work(
            self.policy,
            rollout.response_start.tolist(),
            rollout.response_length.tolist(),
            epochs=seen / once if once else 0.0,
            reward_models=self.reward_models,
            critic=self.critic,
            frozen=self.frozen,
        )
        return limit_seconds(work, self.flops_per_s)
