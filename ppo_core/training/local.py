"""The reference engine: one process, plain torch, AdamW. What other engines compute must equal this."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ppo_core.errors import CheckpointError
from ppo_core.models.logits_head import EntropyUse
from ppo_core.models.policy import PolicyModel, PolicyOutput
from ppo_core.spec import RunSpec
from ppo_core.training.engine import PassSettings, StepReport
from ppo_core.training.microbatches import Microbatch
from ppo_core.training.schedule import learning_rate_factor

MOMENTS = ("exp_avg", "exp_avg_sq")


class LocalEngine:
    """Trains `policy` (trunk, language-model head and value head) in this process.

    AdamW with its customary moments' decay and no weight decay: the KL penalty is what holds the policy back. One
    joint gradient norm over policy and value head is clipped.
    """

    def __init__(self, policy: PolicyModel, spec: RunSpec) -> None:
        self._policy = policy
        self._spec = spec
        self._num_steps = 0
        head = list(policy.value_head.parameters())
        trunk = [parameter for parameter in policy.parameters() if not any(parameter is own for own in head)]
        update = spec.update
        self._base_rates = (update.learning_rate, update.value_learning_rate or update.learning_rate)
        self._optimizer = torch.optim.AdamW(
            [{"params": trunk}, {"params": head}], lr=update.learning_rate, weight_decay=0.0, fused=True
        )

    @property
    def policy(self) -> PolicyModel:
        return self._policy

    @property
    def num_steps(self) -> int:
        return self._num_steps

    def pass_settings(self) -> PassSettings:
        modules = list(self._policy.modules())
        return PassSettings(
            attention_kernel=str(getattr(self._policy.model.config, "_attn_implementation", "unknown")),
            dropout=max((module.p for module in modules if isinstance(module, nn.Dropout)), default=0.0),
            training_mode=any(module.training for module in modules),
            dtype=str(next(self._policy.parameters()).dtype),
        )

    def forward(self, batch: Microbatch, *, entropy: EntropyUse, detach_trunk: bool = False) -> PolicyOutput:
        return self._policy.predict(
            batch.input_ids,
            batch.attention_mask,
            batch.mask,
            temperature=self._spec.rollout.temperature,
            entropy=entropy,
            detach_trunk=detach_trunk,
        )

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> StepReport:
        factor = learning_rate_factor(self._num_steps, self._spec.num_optimizer_steps, self._spec.update)
        rates = [rate * factor for rate in self._base_rates]
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        value_grads = [own.grad for own in self._policy.value_head.parameters() if own.grad is not None]
        value_norm = float(nn.utils.get_total_norm(value_grads))
        norm = float(nn.utils.clip_grad_norm_(self._policy.parameters(), self._spec.update.max_grad_norm))
        applied = math.isfinite(norm)
        if applied:
            self._optimizer.step()
            self._num_steps += 1
        self.discard_gradients()
        return StepReport(norm, value_norm, applied, rates[0], rates[1])

    def discard_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def export_state(self) -> dict[str, Tensor]:
        tensors = {}
        for name, parameter in self._policy.named_parameters():
            tensors[f"master/{name}"] = parameter.detach()
            state = self._optimizer.state.get(parameter, {})
            tensors.update({f"{key}/{name}": state[key] for key in ("step", *MOMENTS) if key in state})
        return tensors

    def load_state(self, tensors: dict[str, Tensor], num_steps: int) -> None:
        """Take over weights and moments.

        Raises:
            CheckpointError: a parameter is missing or has another shape; nothing has changed then.
        """
        parameters = dict(self._policy.named_parameters())
        known = {f"{kind}/{name}" for kind in ("master", "step", *MOMENTS) for name in parameters}
        for name, parameter in parameters.items():
            saved = tensors.get(f"master/{name}")
            if saved is None:
                raise CheckpointError(f"the checkpoint has no weights for {name}")
            if saved.shape != parameter.shape:
                raise CheckpointError(
                    f"{name} has shape {list(saved.shape)} in the checkpoint, {list(parameter.shape)} in the model"
                )
        if unknown := sorted(set(tensors) - known):
            raise CheckpointError(f"the checkpoint holds {unknown[0]}, which this model does not have")
        self._optimizer.state.clear()
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(tensors[f"master/{name}"])
                if f"exp_avg/{name}" in tensors:
                    moments = {key: tensors[f"{key}/{name}"].clone() for key in ("step", *MOMENTS)}
                    self._optimizer.state[parameter] = moments
        self._num_steps = num_steps
