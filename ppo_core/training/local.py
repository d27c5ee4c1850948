"""The reference engine: one process, plain torch. What other engines compute must equal this."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from ppo_core.models.critic import CriticModel
from ppo_core.models.logits_head import EntropyUse
from ppo_core.models.policy import PolicyModel, PolicyOutput
from ppo_core.rollout.weights import PolicyWeights, Probe, probe_of
from ppo_core.spec import RunSpec
from ppo_core.training.engine import PassSettings, StateSlice, StepReport, check_saved, pass_settings
from ppo_core.training.microbatches import Microbatch
from ppo_core.training.optimizer import MOMENTS, ClippedAdamW, MasterWeights
from ppo_core.training.schedule import learning_rate_factor

CRITIC = "critic."  # before the names of a separate critic's weights


class LocalEngine:
    """Trains `policy`, and `critic` where values come from a separate one, in this process.

    Policy and shared value head have one optimizer and one joint gradient norm, a separate critic has its own.
    """

    def __init__(self, policy: PolicyModel, spec: RunSpec, critic: CriticModel | None = None) -> None:
        self._policy, self._critic, self._spec = policy, critic, spec
        self._num_steps = 0
        named = list(policy.named_parameters())
        if critic is not None:
            named += [(CRITIC + name, parameter) for name, parameter in critic.named_parameters()]
        self._masters = MasterWeights(named)
        masters = self._masters.by_name
        update = spec.update
        rate, value_rate = update.learning_rate, update.value_learning_rate or update.learning_rate
        heads = [master for name, master in masters.items() if name.startswith("value_head.")]
        critics = [master for name, master in masters.items() if name.startswith(CRITIC)]
        value_side = {id(master) for master in (*heads, *critics)}
        trunk = [master for master in masters.values() if id(master) not in value_side]
        self._value_weights = critics or heads
        self._policy_optimizer = ClippedAdamW(
            [(trunk, rate), *([(heads, value_rate)] if heads else [])], update.max_grad_norm
        )
        self._critic_optimizer = ClippedAdamW([(critics, value_rate)], update.max_grad_norm) if critics else None

    @property
    def policy(self) -> PolicyModel:
        return self._policy

    @property
    def num_steps(self) -> int:
        return self._num_steps

    def pass_settings(self) -> PassSettings:
        return pass_settings(self._policy, self._critic)

    def forward(self, batch: Microbatch, *, entropy: EntropyUse, freeze_policy: bool = False) -> PolicyOutput:
        output = self._policy.predict(
            batch.input_ids,
            batch.attention_mask,
            batch.mask,
            temperature=self._spec.rollout.temperature,
            entropy=entropy,
            token_sets=batch.token_sets,
            freeze_policy=freeze_policy,
        )
        if self._critic is None:
            return output
        return replace(output, values=self._critic.values(batch.input_ids, batch.attention_mask, batch.mask))

    def backward(self, policy_loss: Tensor | None, value_loss: Tensor) -> None:
        loss = value_loss if policy_loss is None else policy_loss + value_loss
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> StepReport:
        value_norm = _norm(self._value_weights)
        norms = [optimizer.clip() for optimizer in self._optimizers]
        applied = all(map(math.isfinite, norms))
        factor = learning_rate_factor(self._num_steps, self._spec.num_optimizer_steps, self._spec.update)
        rates = []
        if applied:
            for optimizer in self._optimizers:
                rates += optimizer.step(factor)
            self._masters.copy_to_weights()
            self._num_steps += 1
        self.discard_gradients()
        return StepReport(norms[0], value_norm, applied, *(rates or [math.nan, math.nan]))

    def discard_gradients(self) -> None:
        for optimizer in self._optimizers:
            optimizer.clear()

    def weights(self) -> PolicyWeights:
        return PolicyWeights(self._policy)

    def probe(self) -> Probe:
        return probe_of(self._policy)

    def export_state(self) -> dict[str, StateSlice]:
        tensors = {}
        for name, master in self._masters.by_name.items():
            tensors[f"master/{name}"] = master.detach()
            tensors.update(
                {f"{key}/{name}": tensor for key, tensor in self._optimizer_of(name).moments(master).items()}
            )
        return {key: StateSlice(tuple(tensor.shape), 0, tensor) for key, tensor in tensors.items()}

    def load_state(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        masters = self._masters.by_name
        check_saved(tensors, {name: master.shape for name, master in masters.items()})
        for name, master in masters.items():
            with torch.no_grad():
                master.copy_(tensors[f"master/{name}"])
            moments = {key: tensors[f"{key}/{name}"] for key in MOMENTS if f"{key}/{name}" in tensors}
            self._optimizer_of(name).take_moments(master, moments)
        self._masters.copy_to_weights()
        self._num_steps = num_steps

    @property
    def _optimizers(self) -> list[ClippedAdamW]:
        return [self._policy_optimizer] + ([self._critic_optimizer] if self._critic_optimizer else [])

    def _optimizer_of(self, name: str) -> ClippedAdamW:
        if name.startswith(CRITIC):
            assert self._critic_optimizer is not None  # It exists with the critic's weights.
            return self._critic_optimizer
        return self._policy_optimizer


def _norm(weights: list[Tensor]) -> float:
    """Joint norm of the gradients that there are."""
    return float(nn.utils.get_total_norm([weight.grad for weight in weights if weight.grad is not None]))
