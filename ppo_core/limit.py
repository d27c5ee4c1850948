"""How much arithmetic one PPO iteration needs, and what share of the hardware's limit it ran at. Without torch.

The count is of real tokens, never of padding, and takes each head only where it is needed, so padding, overhead and
waiting show as a lower share. With N_b and N_h the weights of body and head matrices, L layers, h heads of size d:

    forward       2 · N_b · tokens + 2 · N_h · scored tokens + 2 · L · h · d · Σ length²   (attention is causal)
    training      3 × forward, for each epoch
    training with frozen weights (adapters)   2 × forward: their gradients are not made
    an iteration  generation (one forward with a key-value cache) + old logprobs + reference + reward models + training

A shared value head adds nothing worth counting, a separate critic a forward without head beside the old logprobs and
its own training. Layers that are made again in the backward pass are not counted: they are a price, not a need. The
limit is the arithmetic over the matrix-product speed that was measured on this machine (`ppo_core.training.calibrate`);
memory bandwidth, which may bind generation on a GPU, is not in it, so the true limit may be nearer than the share says.
It knows neither clocks nor devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppo_core.model_shape import ModelShape


@dataclass(frozen=True)
class Work:
    """Floating-point operations: those of weight matrices, and those of causal attention."""

    matmul: float
    attention: float

    @property
    def total(self) -> float:
        return self.matmul + self.attention

    def __mul__(self, factor: float) -> Work:
        return Work(self.matmul * factor, self.attention * factor)

    def __add__(self, other: Work) -> Work:
        return Work(self.matmul + other.matmul, self.attention + other.attention)


@dataclass(frozen=True)
class IterationWork:
    """The arithmetic of one iteration, by phase."""

    rollout: Work
    score: Work
    logprobs: Work
    update: Work

    @property
    def total(self) -> float:
        return self.rollout.total + self.score.total + self.logprobs.total + self.update.total


def forward_work(shape: ModelShape, lengths: Sequence[int], num_scored: int) -> Work:
    """One forward pass over rows of real `lengths`, with the head on `num_scored` of their tokens."""
    return Work(
        matmul=2.0 * shape.body_matmul * sum(lengths) + 2.0 * shape.head_matmul * num_scored,
        attention=2.0 * shape.layers * shape.heads * shape.head_dim * sum(length * length for length in lengths),
    )


def iteration_work(
    policy: ModelShape,
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
    epochs: float,
    reward_models: Sequence[ModelShape] = (),
    critic: ModelShape | None = None,
    frozen: bool = False,
) -> IterationWork:
    """The arithmetic of one iteration.

    Args:
        policy: of the policy, and so of its reference.
        prompt_lengths, response_lengths: real tokens of each row.
        epochs: passes of the update; a fraction when they ended early.
        reward_models: those that read each whole row, taken to be as long in their tokens.
        critic: of a separate critic.
        frozen: whether the policy's own weights stay as they are and adapters beside them are trained.

    Raises:
        ValueError: the two lists differ in length.
    """
    rows = [prompt + response for prompt, response in zip(prompt_lengths, response_lengths, strict=True)]
    num_scored = sum(response_lengths)
    forward = forward_work(policy, rows, num_scored)
    # The last token of a response is sampled and never fed back.
    fed = [max(prompt + response - 1, 0) for prompt, response in zip(prompt_lengths, response_lengths, strict=True)]
    score = Work(0.0, 0.0)
    for shape in reward_models:
        score = score + forward_work(shape, rows, 0)
    values = forward_work(critic, rows, 0) if critic else Work(0.0, 0.0)
    return IterationWork(
        rollout=forward_work(policy, fed, num_scored),
        score=score,
        logprobs=forward * 2 + values,
        update=forward * ((2 if frozen else 3) * epochs) + values * (3 * epochs),
    )


def limit_seconds(work: IterationWork, flops_per_s: float) -> float:
    """Seconds that the work takes at a measured speed.

    Raises:
        ValueError: the speed is not positive.
    """
    if not flops_per_s > 0:
        raise ValueError(f"flops_per_s is {flops_per_s}, expected a positive speed")
    return work.total / flops_per_s


def limit_fraction(limit_s: float, actual_s: float) -> float | None:
    """`limit/fraction`: seconds at the limit / seconds taken.

    None where that is beyond 1: then the formula, the clock or the measured speed is wrong (a speed measured while
    other work had the machine is too low), and no number is better than that one.
    """
    return limit_s / actual_s if 0 < limit_s <= actual_s else None
