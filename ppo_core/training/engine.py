"""The seam to whatever runs the passes and the optimizer. Normalisation, clipping rule and formats sit above it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ppo_core.models.logits_head import EntropyUse
from ppo_core.models.policy import PolicyModel, PolicyOutput
from ppo_core.rollout.weights import PolicyWeights, Probe
from ppo_core.training.microbatches import Microbatch


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

    def export_state(self) -> dict[str, Tensor]:
        """Weights (`master/NAME`) and moments (`step/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME`), float32."""
        ...

    def load_state(self, tensors: dict[str, Tensor], num_steps: int) -> None: ...
