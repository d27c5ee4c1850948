"""Bytes of weights, gradients and moments that one rank holds, by engine and ZeRO stage. No torch.

What is held is counted, a trained parameter, D ranks; "sums" are what adding gradients up in float32 takes beyond a
gradient in the weights' precision:

    engine, dtype         weights   masters   moments   gradients   sums
    local float32         4         -         8         4           -
    local bfloat16        2         4         8         2           2
    ZeRO 0 float32        4         -         8         4           -
    ZeRO 1 float32        4         4/D       8/D       4           -
    ZeRO 1 bfloat16       2         4/D       8/D       2           4
    ZeRO 2 float32        4         4/D       8/D       4/D         -
    ZeRO 2 bfloat16       2         4/D       8/D       2/D         2/D
    ZeRO 3 float32        4/D       4/D       8/D       4/D         -
    ZeRO 3 bfloat16       2/D       4/D       8/D       2/D         2/D

So bfloat16 under ZeRO 3 takes 16 bytes a trained parameter over the ranks, and 2 more for sums. Read against DeepSpeed
0.19.8, and measured with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ppo_core.model_shape import ModelShape
from ppo_core.pass_memory import FLOAT
from ppo_core.spec import RunSpec

_MOMENTS = 2
# Gradients of one exchange: enough to be bound by the wire, and 200 MB at most.
REDUCE_BUCKET = 50_000_000
# Most weights that ZeRO 3 keeps whole.
_MAX_WHOLE_WEIGHTS = 1_000_000_000
# Weights that ZeRO 3 steps at once, and gradients that are reduced at once without ZeRO.
_STEP_GROUP = 1_000_000_000
_ALL_REDUCE = 500_000_000


@dataclass(frozen=True)
class Networks:
    """What a run loads. `rewards` are the reward models whose sizes are known."""

    policy: ModelShape
    critic: ModelShape | None
    rewards: tuple[ModelShape, ...]


@dataclass(frozen=True)
class StateBytes:
    """What one rank holds for the whole run; see the module's head for what is trained.

    frozen   the reference, the weights beside which adapters lie, and where ZeRO 3 leaves no rank a whole policy, the
             copy that the transformers engine generates with
    rewards  4 bytes a weight of the reward models, on rank 0, and only where the passes run in main memory, too
    """

    weights_bytes: int
    masters_bytes: int
    moments_bytes: int
    gradients_bytes: int
    gradient_sums_bytes: int
    frozen_bytes: int
    rewards_bytes: int

    @property
    def total(self) -> int:
        """All but sums."""
        return self.loaded + self.moments_bytes + self.gradients_bytes

    @property
    def loaded(self) -> int:
        """What there is before the first optimizer step, gradients aside."""
        return self.weights_bytes + self.masters_bytes + self.frozen_bytes + self.rewards_bytes

    @property
    def all_gradients(self) -> int:
        return self.gradients_bytes + self.gradient_sums_bytes

    @property
    def optimizer(self) -> int:
        """What `training.offload` moves to main memory."""
        return self.masters_bytes + self.moments_bytes + self.all_gradients


@dataclass(frozen=True)
class Workspace:
    """What an engine needs beside the states.

    `kept` are gradients that stay between optimizer steps, `held` is memory that is always taken. `whole` is made of
    partitioned weights for a pass, `backward` holds gradients on their way to sums and other ranks, `step` what the
    optimizer reads.
    """

    kept: int = 0
    held: int = 0
    whole: int = 0
    backward: int = 0
    step: int = 0


def bytes_a_weight(spec: RunSpec) -> int:
    """Bytes of one weight of policy, reference and critic."""
    return 2 if spec.policy.dtype == "bfloat16" else FLOAT


def trained_parameters(spec: RunSpec, policy: ModelShape, critic: ModelShape | None) -> int:
    """Trained parameters: the policy's or its adapters', and those of a value head (one linear map) or critic."""
    own = policy.parameters if spec.policy.lora is None else policy.adapter_parameters(spec.policy.lora.rank)
    head = (policy if critic is None else critic).hidden + 1
    return own + head + (0 if critic is None else critic.body_parameters)


def states_of(spec: RunSpec, networks: Networks) -> StateBytes:
    """The states of the rank that holds most."""
    weight, stage, ranks = bytes_a_weight(spec), spec.training.zero_stage, spec.training.ranks
    trained = trained_parameters(spec, networks.policy, networks.critic)
    policy = weight * networks.policy.parameters
    frozen = policy
    if spec.policy.lora is not None:
        frozen += _share(policy, ranks if stage == 3 else 1)
    if stage == 3 and spec.rollout.engine == "transformers":
        frozen += policy
    own_masters = weight < FLOAT or stage > 0
    sums = 0
    if weight < FLOAT:
        sums = FLOAT * trained if stage == 1 else _share((FLOAT - weight) * trained, ranks if stage > 1 else 1)
    rewards = FLOAT * sum(shape.body_parameters for shape in networks.rewards)
    return StateBytes(
        weights_bytes=_share(weight * trained, ranks if stage == 3 else 1),
        masters_bytes=_share(FLOAT * trained, ranks if stage else 1) if own_masters else 0,
        moments_bytes=_share(_MOMENTS * FLOAT * trained, ranks if stage else 1),
        gradients_bytes=_share(weight * trained, ranks if stage > 1 else 1),
        gradient_sums_bytes=sums,
        frozen_bytes=frozen,
        rewards_bytes=0 if spec.resources.gpus else rewards,
    )


def workspace_of(spec: RunSpec, networks: Networks, states: StateBytes) -> Workspace:
    """What the engine needs beside `states`."""
    weight, stage, ranks = bytes_a_weight(spec), spec.training.zero_stage, spec.training.ranks
    trained = trained_parameters(spec, networks.policy, networks.critic)
    if spec.training.engine == "local":
        # The gradient of the largest matrix, beside the sum that it is added to; in bfloat16 made float32 first.
        largest = 0 if spec.policy.lora is not None else _largest_matrix(networks.policy)
        return Workspace(backward=largest * (FLOAT + (weight if weight < FLOAT else 0)))
    bucket, own = min(REDUCE_BUCKET, trained), _share(trained, ranks)
    if stage == 0:
        return Workspace(step=FLOAT * min(trained, _ALL_REDUCE) if ranks > 1 else 0)
    if stage == 3:
        whole = weight * min(trained, _MAX_WHOLE_WEIGHTS) if ranks > 1 else 0
        return Workspace(
            kept=states.all_gradients,
            held=FLOAT * bucket + whole,  # Weights that will soon be read again stay whole.
            whole=whole,
            backward=(weight + (FLOAT if weight < FLOAT else 0)) * bucket,
            step=FLOAT * min(own, _STEP_GROUP),
        )
    return Workspace(
        kept=states.gradient_sums_bytes if stage == 1 else 0,
        backward=bucket * FLOAT + (weight * own if stage == 2 else 0),
        step=FLOAT * own if weight == FLOAT else 0,
    )


def _share(whole: int, parts: int) -> int:
    return -(-whole // parts)


def _largest_matrix(policy: ModelShape) -> int:
    return max(policy.head_matmul, policy.hidden * policy.intermediate)
