"""What a spec means in numbers, before anything runs: steps, tokens, memory, disk. A door, importable without torch.

Memory is an estimate from sizes in config.json; the formulas stand beside the numbers they make. It loads no model,
so a family whose parameters are not counted exactly gives None and a warning instead of a guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from ppo_core.errors import DataError
from ppo_core.memory import MemoryEstimate, memory_of
from ppo_core.memory_words import memory_lines, memory_warnings
from ppo_core.memory_words import size_text as size_text
from ppo_core.model_shape import ModelShape, model_shape
from ppo_core.spec import RunSpec
from ppo_core.spec.advice import warnings_of, win_rate_spread
from ppo_core.spec.files import model_config
from ppo_core.spec.hub import is_hub
from ppo_core.spec.prompt_files import prompts_of
from ppo_core.state_memory import Networks, bytes_a_weight, trained_parameters

# One token of a kept sample: ids, text and seven numbers as JSON.
SAMPLE_BYTES_A_TOKEN = 180


@dataclass(frozen=True)
class Estimate:
    """A spec in numbers. None where a model's family is not counted; `meaning` is for people, line by line."""

    responses: int
    response_tokens_max: int
    optimizer_steps: int
    rows_a_minibatch: float
    policy_parameters: int | None
    reward_parameters: tuple[int | None, ...]
    memory: MemoryEstimate | None
    checkpoint_bytes: int | None
    checkpoints_kept: int
    disk_bytes: int | None
    warnings: tuple[str, ...]
    meaning: tuple[str, ...]

    @property
    def news(self) -> tuple[str, ...]:
        """The lines of `meaning` that no warning begins with: what one says with its remedy is not said again."""
        return tuple(line for line in self.meaning if not any(text.startswith(line) for text in self.warnings))

    def as_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)


def estimate(spec: RunSpec, config: Mapping[str, Any] | None = None, *, start_iteration: int = 0) -> Estimate:
    """What `spec` means in numbers, from after `start_iteration` on.

    Args:
        spec: a checked spec. Reward models' sizes are read from their folders where those exist.
        config: the policy's config.json; None reads it from the policy's folder.
        start_iteration: what the checkpoint that it starts from has behind it; 0 without one.
    """
    policy = model_shape(config if config is not None else _config(spec.policy.model))
    rewards = [model_shape(_config(source.model)) for source in spec.reward.sources if source.model is not None]
    # A classifier's head is as good as nothing beside its trunk, and its input embedding is counted once.
    reward_parameters = tuple(None if shape is None else shape.body_parameters for shape in rewards)
    num_iterations = max(0, spec.iterations - start_iteration)
    kept = _checkpoints_kept(spec, start_iteration)
    critic = _critic(spec, policy)
    checkpoint_bytes = None if policy is None else _checkpoint_bytes(spec, policy, critic)
    samples_bytes = _samples_bytes(spec, start_iteration)
    disk_bytes = None if checkpoint_bytes is None else (kept + 1) * checkpoint_bytes + samples_bytes
    known = tuple(shape for shape in rewards if shape is not None)
    memory = None if policy is None else memory_of(spec, Networks(policy, critic, known))
    numbers = Estimate(
        responses=num_iterations * spec.rollout.batch_size,
        response_tokens_max=num_iterations * spec.rollout.batch_size * spec.rollout.max_new_tokens,
        optimizer_steps=num_iterations * spec.update.epochs * spec.update.minibatches,
        rows_a_minibatch=spec.rollout.batch_size / spec.update.minibatches,
        policy_parameters=None if policy is None else policy.parameters,
        reward_parameters=reward_parameters,
        memory=memory,
        checkpoint_bytes=checkpoint_bytes,
        checkpoints_kept=kept,
        disk_bytes=disk_bytes,
        warnings=(),
        meaning=(),
    )
    about_memory = () if memory is None else memory_warnings(spec, memory)
    critic_is_unknown = critic is None and spec.policy.value_head == "separate"
    gate_prompts = _gate_prompts(spec)
    warnings = (
        *warnings_of(spec),
        *_few_gate_prompts(spec, gate_prompts),
        *_unknown(policy, critic_is_unknown, reward_parameters),
        *about_memory,
    )
    return replace(numbers, warnings=warnings, meaning=_meaning(spec, numbers, start_iteration, gate_prompts))


def _config(folder: str) -> Mapping[str, Any]:
    try:
        found = model_config(folder)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _gate_prompts(spec: RunSpec) -> int:
    """Held-out prompts that a gate has: as many as it asks for, or those that the file holds where they are fewer."""
    if spec.gate.judge is None or spec.data.held_out is None or is_hub(spec.data.held_out):
        return spec.gate.prompts
    try:
        found = sum(1 for _ in islice(prompts_of(Path(spec.data.held_out)), spec.gate.prompts))
    except DataError:  # The checks of the files have named it.
        return spec.gate.prompts
    return found or spec.gate.prompts


def _few_gate_prompts(spec: RunSpec, there: int) -> Iterator[str]:
    if there < spec.gate.prompts:
        yield (
            f"gate.prompts is {spec.gate.prompts} but data.held_out has {_count(there, 'prompt')}: gates compare "
            f"answers to those, and a win rate of one half is uncertain by ± {win_rate_spread(there):.2f}; add prompts"
        )


def _critic(spec: RunSpec, policy: ModelShape | None) -> ModelShape | None:
    if spec.policy.value_head != "separate":
        return None
    return policy if spec.policy.critic_model is None else model_shape(_config(spec.policy.critic_model))


def _checkpoint_bytes(spec: RunSpec, policy: ModelShape, critic: ModelShape | None) -> int:
    """The policy as a folder, and float32 masters and two moments of what is trained."""
    return bytes_a_weight(spec) * policy.parameters + 12 * trained_parameters(spec, policy, critic)


def _times(spec: RunSpec, every: int, start_iteration: int) -> int:
    """How often something is done that is done every so many iterations."""
    return max(0, spec.iterations // every - start_iteration // every)


def _checkpoints_kept(spec: RunSpec, start_iteration: int) -> int:
    """Most checkpoints that stand at once when the run ends, those kept for several reasons counted once each."""
    rules = spec.checkpoints
    # One more at the end where that is no multiple.
    written = _times(spec, rules.every, start_iteration) + bool(spec.iterations % rules.every)
    if rules.keep_last < 0:
        return written
    every = _times(spec, rules.keep_every, start_iteration) if rules.keep_every else 0
    judged = (
        rules.keep_best + min(2, _times(spec, spec.gate.every, start_iteration)) if spec.gate.judge is not None else 0
    )
    return min(written, rules.keep_last + judged + every)


def _samples_bytes(spec: RunSpec, start_iteration: int) -> int:
    longest = spec.rollout.max_new_tokens
    return (
        _times(spec, spec.samples.every, start_iteration) * spec.samples.per_iteration * longest * SAMPLE_BYTES_A_TOKEN
    )


def _unknown(policy: ModelShape | None, critic_is_unknown: bool, rewards: tuple[int | None, ...]) -> list[str]:
    found = []
    if policy is None:
        found.append("memory and disk are not known: the policy's family or sizes are not ones that can be counted")
    elif critic_is_unknown:
        found.append("the critic's size is not known, so it is missing from memory and disk")
    if None in rewards:
        found.append("a reward model's size is not known, so it is missing from the memory estimate")
    return found


def _meaning(spec: RunSpec, numbers: Estimate, start_iteration: int, gate_prompts: int) -> tuple[str, ...]:
    update, batch = spec.update, spec.rollout.batch_size
    num_iterations = max(0, spec.iterations - start_iteration)
    which = f" ({start_iteration + 1} to {spec.iterations})" if 0 < start_iteration < spec.iterations else ""
    lines = [
        f"{_count(num_iterations, 'iteration')}{which} × {_count(batch, 'prompt')} = {numbers.responses:,} responses, "
        f"at most {numbers.response_tokens_max:,} response tokens",
        f"{_count(update.epochs, 'epoch')} × {_count(update.minibatches, 'minibatch')} of about "
        f"{numbers.rows_a_minibatch:.3g} responses an iteration = {numbers.optimizer_steps:,} optimizer steps",
        f"a response cut off at {_count(spec.rollout.max_new_tokens, 'token')} "
        + (
            f"has {spec.reward.missing_eos_penalty:g} added to its score"
            if spec.reward.missing_eos_penalty
            else "keeps its score"
        ),
        f"each nat of KL to the reference costs {spec.kl.coef:g} of score" + _steering(spec),
        *_corrections(spec),
    ]
    if numbers.memory is not None and numbers.policy_parameters is not None:
        lines += memory_lines(spec, numbers.memory, numbers.policy_parameters)
    if numbers.checkpoint_bytes is not None and numbers.disk_bytes is not None:
        lines.append(
            f"{_count(numbers.checkpoints_kept, 'checkpoint')} of {size_text(numbers.checkpoint_bytes)} stay, "
            f"about {size_text(numbers.disk_bytes)} of disk"
        )
    lines.append(_watching(spec, start_iteration, gate_prompts))
    return tuple(lines)


def _steering(spec: RunSpec) -> str:
    if spec.kl.target is None:
        return ""
    return f" at first, and then what holds a response's KL at {spec.kl.target:g} nats"


def _corrections(spec: RunSpec) -> list[str]:
    found = []
    if spec.reward.length_baseline == "linear":
        found.append("what goes with length is taken from the scores, by each iteration's own least-squares line")
    if spec.reward.normalize:
        found.append("scores count in their running standard deviations, and so do penalty, clip and the price of KL")
    return found


def _watching(spec: RunSpec, start_iteration: int, gate_prompts: int) -> str:
    if spec.gate.judge is None:
        return "no judge: nothing watches for reward hacking"
    action = {"stop": "stops the run", "pause": "pauses the run", "note": "is noted"}[spec.gate.action]
    gates = _times(spec, spec.gate.every, start_iteration)
    # Each pair in both orders, with the last gate's answer and with the start's.
    asked = f", asked up to {4 * gate_prompts:,} times each" if spec.gate.judge.kind == "openai" else ""
    return (
        f"the judge compares answers to {_count(gate_prompts, 'held-out prompt')} every "
        f"{_count(spec.gate.every, 'iteration')}, {_count(gates, 'time')}{asked}; a tripped gate {action}"
    )


def _count(number: int, noun: str) -> str:
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}{'es' if noun == 'minibatch' else 's'}"
