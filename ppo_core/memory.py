"""Bytes of tensors that a trainer holds, by what they are and by phase, counted from a spec and its models' sizes.

What each engine really holds is counted, whatever the usual rule says. It loads no model and no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from ppo_core.model_shape import ModelShape
from ppo_core.pass_memory import FLOAT, Tokens, decoding_bytes, head_bytes, kept_bytes, passing_bytes
from ppo_core.spec import RunSpec
from ppo_core.state_memory import (
    Networks,
    StateBytes,
    Workspace,
    bytes_a_weight,
    states_of,
    trained_parameters,
    workspace_of,
)

# Interpreter, torch and transformers, before any weight: measured as about 0.5 GiB resident on a CPU.
PROGRAM_BYTES = 512 * 1024**2
# Tokens of a reward model's forward pass.
_REWARD_TOKENS = 8192
# Most rows and columns of the matrix products that the machine's speed is measured with.
_CALIBRATION_ROWS, _CALIBRATION_COLUMNS = 4096, 16384


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank, the one that holds most; on a GPU if the run has GPUs. A phase is what is held at its fullest
    moment, the states among it.

    loading     all weights, and what the machine's speed is measured with
    rollout     and scoring and evaluation: the larger of decoding, by the transformers engine, and a reward model's
                pass
    logprobs    a pass that keeps nothing, and logits
    update      gradients, and what a microbatch keeps, logits included; the larger of the two where an optimizer step
                has one microbatch and its gradients come and go
    saving      a copy of the policy, in main memory
    peak        the fullest phase, and the program itself
    engines     vLLM processes beside the rank, on the same GPU: weights, and a key-value cache of all rows that they
                generate at once (on a CPU what `rollout.vllm.kv_cache_gib` says)
    host        all ranks together in main memory, and their engines where there is no GPU
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
    engines_bytes: int
    host_bytes: int

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
    states = states_of(spec, networks)
    workspace = workspace_of(spec, networks, states)
    activations = _activations(spec, networks)
    phases = _phases(spec, networks, states, workspace, activations)
    peak = PROGRAM_BYTES + max(phases.values())
    engines = _engines(spec, networks.policy)
    return MemoryEstimate(
        states=states,
        states_bytes=states.total,
        activations_bytes=activations,
        **{f"{phase}_bytes": held for phase, held in phases.items()},
        peak_bytes=peak,
        engines_bytes=engines,
        host_bytes=_beside_gpus(spec, networks, states)
        if spec.resources.gpus
        else spec.training.ranks * (peak + engines) - (spec.training.ranks - 1) * states.rewards_bytes,
    )


def _phases(
    spec: RunSpec, networks: Networks, states: StateBytes, workspace: Workspace, activations: int
) -> dict[str, int]:
    policy, weight, on_gpu = networks.policy, bytes_a_weight(spec), spec.resources.gpus > 0
    offloads = on_gpu and spec.training.offload != "none"
    moved = states.optimizer if offloads else 0
    gradients = 0 if offloads else states.all_gradients - workspace.kept
    kept = 0 if offloads else workspace.kept
    resident = states.loaded + states.moments_bytes + states.all_gradients - moved - gradients + workspace.held
    whole = _whole_pass(spec)
    widest = max(passing_bytes(shape, whole) for shape in (policy, networks.critic) if shape is not None)
    passing = activations + max(workspace.whole, workspace.backward)
    if _steps_have_several(spec) or spec.training.engine != "local":
        update = gradients + max(passing, workspace.step)
    else:
        update = max(activations, gradients + workspace.backward)
    # A weight with its adapters merged in, and what they add to it.
    merged = 0 if spec.policy.lora is None else 2 * policy.hidden * policy.intermediate
    loaded = states.loaded + kept + workspace.held - (states.masters_bytes if offloads else 0)
    return {
        # Before ZeRO has partitioned it, every rank has the whole policy.
        "loading": max(loaded + _calibration(spec, policy), 2 * weight * policy.parameters),
        "rollout": resident + _generation(spec, networks),
        "logprobs": resident + workspace.whole + widest + head_bytes(policy, _positions(spec, whole.tokens)),
        "update": resident + update,
        "saving": resident + weight * (merged + (0 if on_gpu else policy.parameters)),
    }


def _activations(spec: RunSpec, networks: Networks) -> int:
    """What the largest microbatch of a rank keeps, logits included."""
    microbatch = _over(spec, _microbatch_rows(spec))
    shapes = (networks.policy, networks.critic)
    kept = [kept_bytes(shape, microbatch, spec.policy.gradient_checkpointing) for shape in shapes if shape is not None]
    return sum(kept) + head_bytes(networks.policy, _positions(spec, microbatch.tokens))


def _generation(spec: RunSpec, networks: Networks) -> int:
    decoding = 0
    if spec.rollout.engine == "transformers":
        prompt, rows = spec.data.max_prompt_tokens, _own(spec, spec.rollout.batch_size)
        decoding = decoding_bytes(networks.policy, rows, prompt, _longest(spec), bytes_a_weight(spec))
    rewards = () if spec.resources.gpus else networks.rewards
    return max(decoding, max((_reward_pass(spec, shape) for shape in rewards), default=0))


def _engines(spec: RunSpec, policy: ModelShape) -> int:
    if not spec.rollout.starts_vllm:
        return 0
    options, weight = spec.rollout.vllm, bytes_a_weight(spec)
    rows = min(options.max_rows, _share(_own(spec, spec.rollout.batch_size), options.replicas))
    cache = weight * policy.kv_elements * rows * _longest(spec)
    if not spec.resources.gpus:
        cache = int(options.kv_cache_gib * 2**30) + PROGRAM_BYTES
    return options.replicas * _share(weight * policy.parameters + cache, options.tensor_parallel)


def _beside_gpus(spec: RunSpec, networks: Networks, states: StateBytes) -> int:
    """Main memory of all ranks beside their GPUs: programs, what is offloaded, reward models on rank 0, and the larger
    of a policy on its way to each rank's GPU and what is copied out at a save."""
    ranks, weight, policy = spec.training.ranks, bytes_a_weight(spec), networks.policy
    offloaded = states.optimizer if spec.training.offload != "none" else 0
    trained = trained_parameters(spec, policy, networks.critic)
    saved = weight * policy.parameters + 3 * FLOAT * trained
    rewards = sum(FLOAT * shape.body_parameters for shape in networks.rewards)
    reading = max((_reward_pass(spec, shape) for shape in networks.rewards), default=0)
    return ranks * (PROGRAM_BYTES + offloaded) + rewards + max(ranks * weight * policy.parameters, saved, reading)


def _longest(spec: RunSpec) -> int:
    return spec.data.max_prompt_tokens + spec.rollout.max_new_tokens


def _share(whole: int, parts: int) -> int:
    return -(-whole // parts)


def _own(spec: RunSpec, rows: int) -> int:
    """Most of so many rows that are one rank's."""
    return _share(rows, spec.training.ranks)


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
    """Rows of a rank's microbatch, and its microbatches, of the plan that bfloat16 keeps: at least one for each
    optimizer step."""
    budget, batch = spec.update.token_budget, _own(spec, spec.rollout.batch_size)
    while _share(batch, _fitting(spec, budget)) < min(spec.update.minibatches, batch):
        budget //= 2
    rows = min(batch, _fitting(spec, budget))
    return rows, _share(batch, rows)


def _dealt(spec: RunSpec) -> int:
    """Most rows of a float32 minibatch that one rank has."""
    return _own(spec, _share(spec.rollout.batch_size, spec.update.minibatches))


def _microbatch_rows(spec: RunSpec) -> int:
    """Rows of the largest microbatch of an update, all rows at their longest."""
    if spec.policy.dtype == "bfloat16":
        return _kept_plan(spec)[0]
    return min(_dealt(spec), _fitting(spec, spec.update.token_budget))


def _steps_have_several(spec: RunSpec) -> bool:
    """Whether an optimizer step has several microbatches of one rank, all rows at their longest."""
    if spec.policy.dtype == "bfloat16":
        return _kept_plan(spec)[1] > spec.update.minibatches
    return _dealt(spec) > _microbatch_rows(spec)


def _whole_pass(spec: RunSpec) -> Tokens:
    """The largest microbatch of the pass over a whole rollout."""
    if spec.policy.dtype == "bfloat16":
        return _over(spec, _kept_plan(spec)[0])
    rows = _own(spec, spec.rollout.batch_size)
    return _over(spec, min(rows, _fitting(spec, spec.update.token_budget)))


def _calibration(spec: RunSpec, policy: ModelShape) -> int:
    rows = min(spec.update.token_budget, _CALIBRATION_ROWS)
    columns = max(policy.intermediate, min(policy.vocabulary, _CALIBRATION_COLUMNS))
    return bytes_a_weight(spec) * (rows * policy.hidden + policy.hidden * columns + rows * columns)


def _reward_pass(spec: RunSpec, shape: ModelShape) -> int:
    """A reward model's pass over texts as long as the policy's rows."""
    longest = _longest(spec)
    tokens = max(longest, min(_REWARD_TOKENS, spec.rollout.batch_size * longest))
    return passing_bytes(shape, Tokens(tokens, longest, FLOAT))
