"""The seam to whatever runs the passes and the optimizer. Normalisation, clipping rule and formats sit above it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from ppo_core.errors import CheckpointError
from ppo_core.models.critic import CriticModel
from ppo_core.models.logits_head import EntropyUse
from ppo_core.models.policy import PolicyModel, PolicyOutput
from ppo_core.rollout.weights import PolicyWeights, Probe
from ppo_core.training.microbatches import Microbatch
from ppo_core.training.optimizer import MOMENTS


@dataclass(frozen=True)
class PassSettings:
    """What must be the same in the pass that makes old logprobs and in the update, or the ratio means nothing."""

    attention_kernel: str
    dropout: float
    training_mode: bool
    dtype: str
    layout: str


@dataclass(frozen=True)
class StepReport:
    """One optimizer step. Norms are those before clipping: the policy's, a shared value head included, and that of the
    value head or critic by itself."""

    grad_norm: float
    value_grad_norm: float
    applied: bool
    learning_rate: float
    value_learning_rate: float


@dataclass(frozen=True)
class StateSlice:
    """A run of one tensor's elements in row-major order: `values`, flat or whole, from element `start` on."""

    shape: tuple[int, ...]  #: of the whole tensor
    start: int
    values: Tensor  #: float32


class TrainEngine(Protocol):
    """One trained policy with its value head or critic, and their optimizers."""

    @property
    def policy(self) -> PolicyModel: ...

    @property
    def num_steps(self) -> int:
        """Optimizer steps that were applied so far."""
        ...

    def pass_settings(self) -> PassSettings: ...

    def forward(self, batch: Microbatch, *, entropy: EntropyUse, freeze_policy: bool = False) -> PolicyOutput:
        """What is said of one microbatch. `freeze_policy`: only the value head or critic gets a gradient."""
        ...

    def backward(self, policy_loss: Tensor | None, value_loss: Tensor) -> None:
        """Add one microbatch's gradients to those that are there; without a policy loss, only the value side's."""
        ...

    def step(self) -> StepReport:
        """Clip, step and clear the gradients; a non-finite gradient norm clears all of them without any step."""
        ...

    def discard_gradients(self) -> None: ...

    def weights(self) -> PolicyWeights:
        """The policy's weights as they are now, for an engine or a file."""
        ...

    def probe(self) -> Probe:
        """What the policy says of the probe's tokens now."""
        ...

    def export_state(self) -> dict[str, StateSlice]:
        """This rank's part of weights (`master/NAME`) and moments (`step/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME`).

        All ranks' parts together are the whole, each element once.
        """
        ...

    def load_state(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        """Take over whole weights and moments; each rank keeps its part.

        Raises:
            CheckpointError: a parameter is missing or has another shape; nothing has changed then.
        """
        ...


def pass_settings(policy: PolicyModel, critic: CriticModel | None) -> PassSettings:
    """As the models are set now."""
    modules = [*policy.modules(), *(critic.modules() if critic is not None else ())]
    return PassSettings(
        attention_kernel=str(getattr(policy.model.config, "_attn_implementation", "unknown")),
        dropout=max((module.p for module in modules if isinstance(module, nn.Dropout)), default=0.0),
        training_mode=any(module.training for module in modules),
        dtype=str(policy.model.dtype),
        layout=policy.trunk.layout,
    )


def check_saved(tensors: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]) -> None:
    """Whether saved tensors are those of a model whose trained parameters have these shapes.

    Raises:
        CheckpointError: a parameter is missing, has another shape, or is not the model's.
    """
    for name, shape in shapes.items():
        if f"master/{name}" not in tensors:
            raise CheckpointError(f"the checkpoint has no weights for {name}")
        saved = tensors[f"master/{name}"].shape
        if list(saved) != list(shape):
            raise CheckpointError(f"{name} has shape {list(saved)} in the checkpoint, {list(shape)} in the model")
    known = {f"{kind}/{name}" for kind in ("master", *MOMENTS) for name in shapes}
    if unknown := sorted(set(tensors) - known):
        raise CheckpointError(f"the checkpoint holds {unknown[0]}, which this model does not have")
