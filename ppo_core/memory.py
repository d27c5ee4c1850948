"""Bytes of tensors that a trainer holds, by what they are and by phase, counted from a spec and its models' sizes.

What each engine really holds is counted, whatever the usual rule says. It loads no model and no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from ppo_core.model_shape import ModelShape
from ppo_core.pass_memory import FLOAT, Tokens, decoding_bytes, head_bytes, kept_bytes, passing_bytes
from ppo_core.spec import RunSpec

# Interpreter, torch and transformers, before any weight: measured as about 0.5 GiB resident on a CPU.
PROGRAM_BYTES = 512 * 1024**2
_MOMENTS = 2
# Tokens of a reward model's forward pass.
_REWARD_TOKENS = 8192
# Most rows and columns of the matrix products that the machine's speed is measured with.
_CALIBRATION_ROWS, _CALIBRATION_COLUMNS = 4096, 16384


@dataclass(frozen=True)
class Networks:
    """What a run loads. `rewards` are the reward models whose sizes are known."""

    policy: ModelShape
    critic: ModelShape | None
    rewards: tuple[ModelShape, ...]


@dataclass(frozen=True)
class StateBytes:
    """What stays for the whole run, `trained` the number of trained parameters; a weight has 4 bytes, or 2 in bfloat16.

    weights     of what is trained, as the passes read it
    masters     4 · trained in bfloat16; a float32 weight is its own master
    moments     8 · trained
    gradients   4 · trained, in bfloat16 too: they are added up on the masters; between optimizer steps there are none
    frozen      the reference, and the weights beside which adapters lie
    rewards     4 bytes a weight of the reward models, where they share this memory: they are always in the host's
    """

    weights_bytes: int
    masters_bytes: int
    moments_bytes: int
    gradients_bytes: int
    frozen_bytes: int
    rewards_bytes: int

    @property
    def total(self) -> int:
        return self.resident + self.gradients_bytes

    @property
    def resident(self) -> int:
        """All but gradients."""
        return self.loaded + self.moments_bytes

    @property
    def loaded(self) -> int:
        """What there is before the first optimizer step."""
        return self.weights_bytes + self.masters_bytes + self.frozen_bytes + self.rewards_bytes


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of the trainer. A phase is what is held at its fullest moment, the states among it.

    loading     all weights, and what the machine's speed is measured with
    rollout     and scoring and evaluation: states without gradients, and the larger of decoding and a reward model's
                pass
    logprobs    states without gradients, a pass that keeps nothing, and logits
    update      states without gradients, and the larger of what a microbatch keeps, logits included, and the gradients;
                both where an optimizer step has several microbatches
    saving      states without gradients, and a copy of the policy
    peak        the fullest phase, and the program itself
    """

    states: StateBytes
    states_bytes: int
    activations_bytes: int
    loading_bytes: int
    rollout_bytes: int
    logprobs_bytes: int
    update_bytes: int
    saving_bytes: int
    peak_bytes: int

    @property
    def phases(self) -> dict[str, int]:
        """Bytes by phase, in the order of an iteration."""
        return {
            "loading": self.loading_bytes,
            "rollout": self.rollout_bytes,
            "logprobs": self.logprobs_bytes,
            "update": self.update_bytes,
            "saving": self.saving_bytes,
        }


def memory_of(spec: RunSpec, networks: Networks) -> MemoryEstimate:
    """The memory that a run of `spec` takes."""
    policy = networks.policy
    states = _states(spec, networks)
    weight = bytes_a_weight(spec)
    microbatch, several = _largest_microbatch(spec)
    whole = _whole_pass(spec)
    activations = sum(
        kept_bytes(shape, microbatch, spec.policy.gradient_checkpointing)
        for shape in (policy, networks.critic)
        if shape is not None
    ) + head_bytes(policy, _positions(spec, microbatch.tokens))
    gradients = states.gradients_bytes + _new_gradient(spec, policy, several)
    rollout = max(
        decoding_bytes(policy, spec.rollout.batch_size, spec.data.max_prompt_tokens, _longest(spec), weight),
        max((_reward_pass(spec, shape) for shape in networks.rewards), default=0),
    )
    widest = max(passing_bytes(shape, whole) for shape in (policy, networks.critic) if shape is not None)
    # A weight with its adapters merged in, and what they add to it.
    merged = 0 if spec.policy.lora is None else 2 * policy.hidden * policy.intermediate
    phases = {
        "loading": states.loaded + _calibration(spec, policy),
        "rollout": states.resident + rollout,
        "logprobs": states.resident + widest + head_bytes(policy, _positions(spec, whole.tokens)),
        "update": states.resident + (activations + gradients if several else max(activations, gradients)),
        "saving": states.resident + weight * (policy.parameters + merged),
    }
    return MemoryEstimate(
        states=states,
        states_bytes=states.total,
        activations_bytes=activations,
        **{f"{phase}_bytes": held for phase, held in phases.items()},
        peak_bytes=PROGRAM_BYTES + max(phases.values()),
    )


def trained_parameters(spec: RunSpec, policy: ModelShape, critic: ModelShape | None) -> int:
    """Trained parameters: the policy's or its adapters', and those of a value head (one linear map) or critic."""
    own = policy.parameters if spec.policy.lora is None else policy.adapter_parameters(spec.policy.lora.rank)
    head = (policy if critic is None else critic).hidden + 1
    return own + head + (0 if critic is None else critic.body_parameters)


def bytes_a_weight(spec: RunSpec) -> int:
    """Bytes of one weight of policy, reference and critic."""
    return 2 if spec.policy.dtype == "bfloat16" else FLOAT


def _states(spec: RunSpec, networks: Networks) -> StateBytes:
    weight = bytes_a_weight(spec)
    trained = trained_parameters(spec, networks.policy, networks.critic)
    copies = 1 if spec.policy.lora is None else 2
    on_gpu = spec.resources.gpus > 0
    return StateBytes(
        weights_bytes=weight * trained,
        masters_bytes=0 if weight == FLOAT else FLOAT * trained,
        moments_bytes=_MOMENTS * FLOAT * trained,
        gradients_bytes=FLOAT * trained,
        frozen_bytes=copies * weight * networks.policy.parameters,
        rewards_bytes=0 if on_gpu else FLOAT * sum(shape.body_parameters for shape in networks.rewards),
    )


def _longest(spec: RunSpec) -> int:
    return spec.data.max_prompt_tokens + spec.rollout.max_new_tokens


def _positions(spec: RunSpec, tokens: int) -> int:
    """Tokens of responses among so many, all rows at their longest."""
    return tokens * spec.rollout.max_new_tokens // _longest(spec) + 1


def _over(spec: RunSpec, rows: int) -> Tokens:
    longest = _longest(spec)
    return Tokens(rows * longest, longest, bytes_a_weight(spec), spec.update.pack_rows)


def _fitting(spec: RunSpec, budget: int) -> int:
    """Rows at their longest that fit into one microbatch."""
    return max(1, budget // _longest(spec))


def _kept_plan(spec: RunSpec) -> tuple[int, int]:
    """Rows of a microbatch, and microbatches, of the plan that bfloat16 keeps: at least one for each optimizer step."""
    budget, batch = spec.update.token_budget, spec.rollout.batch_size
    while -(-batch // _fitting(spec, budget)) < spec.update.minibatches:
        budget //= 2
    rows = min(batch, _fitting(spec, budget))
    return rows, -(-batch // rows)


def _largest_microbatch(spec: RunSpec) -> tuple[Tokens, bool]:
    """The largest microbatch of an update, all rows at their longest, and whether an optimizer step has several."""
    if spec.policy.dtype == "bfloat16":
        rows, parts = _kept_plan(spec)
        return _over(spec, rows), parts > spec.update.minibatches
    dealt = -(-spec.rollout.batch_size // spec.update.minibatches)
    fitting = _fitting(spec, spec.update.token_budget)
    return _over(spec, min(dealt, fitting)), dealt > fitting


def _whole_pass(spec: RunSpec) -> Tokens:
    """The largest microbatch of the pass over a whole rollout."""
    if spec.policy.dtype == "bfloat16":
        return _over(spec, _kept_plan(spec)[0])
    return _over(spec, min(spec.rollout.batch_size, _fitting(spec, spec.update.token_budget)))


def _new_gradient(spec: RunSpec, policy: ModelShape, several: bool) -> int:
    """The gradient of the largest matrix, beside the sum that it is added to; in bfloat16 it is made float32 first."""
    if spec.policy.lora is not None:
        return 0
    weight = bytes_a_weight(spec)
    return _largest_matrix(policy) * (weight + (FLOAT if several and weight < FLOAT else 0))


def _largest_matrix(policy: ModelShape) -> int:
    return max(policy.head_matmul, policy.hidden * policy.intermediate)


def _calibration(spec: RunSpec, policy: ModelShape) -> int:
    rows = min(spec.update.token_budget, _CALIBRATION_ROWS)
    columns = max(policy.intermediate, min(policy.vocabulary, _CALIBRATION_COLUMNS))
    return bytes_a_weight(spec) * (rows * policy.hidden + policy.hidden * columns + rows * columns)


def _reward_pass(spec: RunSpec, shape: ModelShape) -> int:
    """A reward model's pass over texts as long as the policy's rows."""
    if spec.resources.gpus > 0:
        return 0
    longest = _longest(spec)
    tokens = max(longest, min(_REWARD_TOKENS, spec.rollout.batch_size * longest))
    return passing_bytes(shape, Tokens(tokens, longest, FLOAT))
