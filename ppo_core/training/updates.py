"""Epochs and minibatches: one rollout batch becomes optimizer steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor, cat, float64, tensor

from ppo_core.errors import NonFiniteError, RatioError
from ppo_core.losses import PolicyStats, ValueStats, policy_loss, value_loss
from ppo_core.masked import masked_sum
from ppo_core.ranks import ALONE, Ranks
from ppo_core.rollout.batch import Rollout
from ppo_core.spec import RunSpec
from ppo_core.training.engine import PassSettings, TrainEngine
from ppo_core.training.microbatches import (
    Microbatch,
    microbatches,
    minibatch_rows,
    minibatches_of_microbatches,
)
from ppo_core.training.passes import OldPass


@dataclass(frozen=True)
class PPOBatch:
    """All that an update needs, fixed before its first step. Per-token tensors are [B, T]."""

    rollout: Rollout
    old: OldPass
    advantages: Tensor
    returns: Tensor


@dataclass(frozen=True)
class MinibatchReport:
    """One optimizer step, or one that was skipped. Losses and entropy are means over its real tokens."""

    policy_loss: float
    value_loss: float
    entropy: float
    policy: PolicyStats
    value: ValueStats
    grad_norm: float
    value_grad_norm: float
    applied: bool
    learning_rate: float
    value_learning_rate: float

    @property
    def num_tokens(self) -> float:
        return float(self.policy.num_tokens)


@dataclass(frozen=True)
class SkippedStep:
    """A minibatch whose loss or gradient was not finite, with all but the weights to compute it again.

    `epoch` and `step` count from 1. `tensors` are input_ids, attention_mask [b, L] and response_mask, old_logprobs,
    old_values, advantages, returns [b, T], and with limited sampling the ids and counts of its token sets.
    """

    epoch: int
    step: int
    policy_loss: float
    value_loss: float
    grad_norm: float
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class UpdateReport:
    """The whole update: its minibatches by epoch, in order. Those without a real token are only counted."""

    epochs: tuple[tuple[MinibatchReport, ...], ...]
    num_steps: int
    skipped: tuple[SkippedStep, ...]
    num_empty: int
    skipped_in_a_row: int
    stopped_at_target_kl: bool

    @property
    def minibatches(self) -> tuple[MinibatchReport, ...]:
        return tuple(report for epoch in self.epochs for report in epoch)


class SkippedTooOften(NonFiniteError):
    """The run ends here; `skipped` are this iteration's skipped steps, for whoever keeps them."""

    def __init__(self, message: str, skipped: tuple[SkippedStep, ...]) -> None:
        super().__init__(message)
        self.skipped = skipped


def run_updates(
    trainer: TrainEngine,
    batch: PPOBatch,
    spec: RunSpec,
    iteration: int,
    skipped_in_a_row: int = 0,
    ranks: Ranks = ALONE,
) -> UpdateReport:
    """Run the epochs of one iteration. The report is of all ranks' microbatches, and the same on each.

    Before the first optimizer step the policy must repeat its own logprobs: max |ratio - 1| over the first
    minibatch's real tokens within `update.ratio_tolerance`.

    Raises:
        RatioError: it does not; no step has been made.
        SkippedTooOften: `update.max_skipped_steps` steps in a row had a non-finite loss or gradient.
    """
    epochs: list[tuple[MinibatchReport, ...]] = []
    skipped: list[SkippedStep] = []
    num_steps = num_empty = 0
    checked = early = False
    for epoch in range(spec.update.epochs):
        reports: list[MinibatchReport] = []
        for step, parts in enumerate(_minibatches(batch, spec, iteration, epoch, ranks.size), start=1):
            num_tokens = float(sum(int(part.mask.count_nonzero()) for part in parts))
            if num_tokens == 0:
                num_empty += 1
                continue
            report = _backward(trainer, batch, parts, num_tokens, spec, iteration, ranks)
            if not checked:
                _check_ratio(report, batch.old.settings, trainer.pass_settings(), spec, iteration)
                checked = True
            report = _step(trainer, report)
            reports.append(report)
            if report.applied:
                num_steps += 1
                skipped_in_a_row = 0
            else:
                skipped.append(_skipped(batch, parts, report, epoch + 1, step))
                skipped_in_a_row += 1
                if skipped_in_a_row >= spec.update.max_skipped_steps:
                    raise SkippedTooOften(
                        f"iteration {iteration}: loss or gradient was not finite in {skipped_in_a_row} optimizer steps "
                        f"in a row (update.max_skipped_steps); the weights are those of the last finite step",
                        tuple(skipped),
                    )
            early = spec.update.target_kl is not None and float(report.policy.approx_kl) > spec.update.target_kl
            if early:
                break
        epochs.append(tuple(reports))
        if early:
            break
    return UpdateReport(tuple(epochs), num_steps, tuple(skipped), num_empty, skipped_in_a_row, early)


def _minibatches(batch: PPOBatch, spec: RunSpec, iteration: int, epoch: int, num_ranks: int) -> list[list[Microbatch]]:
    """One list of microbatches, of all ranks, for each optimizer step of an epoch."""
    update = spec.update
    if spec.policy.dtype == "bfloat16":
        return minibatches_of_microbatches(
            batch.old.plan, update.minibatches, spec.data_seed, iteration, epoch, num_ranks
        )
    parts = minibatch_rows(batch.rollout.num_rows, update.minibatches, spec.data_seed, iteration, epoch)
    return [microbatches(batch.rollout, rows, update.token_budget, update.row_layout, num_ranks) for rows in parts]


def _backward(
    trainer: TrainEngine,
    batch: PPOBatch,
    parts: list[Microbatch],
    num_tokens: float,
    spec: RunSpec,
    iteration: int,
    ranks: Ranks,
) -> MinibatchReport:
    """Gradients of one minibatch, gathered over its microbatches; every loss is divided by the whole step's tokens."""
    update = spec.update
    warming_up = iteration <= update.critic_warmup_iterations
    total_policy = total_value = total_entropy = 0.0
    policy: PolicyStats | None = None
    value: ValueStats | None = None
    for part in ranks.mine(parts):
        output = trainer.forward(
            part, entropy="trained" if update.entropy_coef > 0 else "measured", freeze_policy=warming_up
        )
        surrogate, policy_stats = policy_loss(
            output.logprobs,
            part.cut(batch.old.logprobs),
            part.cut(batch.advantages),
            part.mask,
            update.clip_range,
            num_tokens,
        )
        error, value_stats = value_loss(
            output.values,
            part.cut(batch.old.values),
            part.cut(batch.returns),
            part.mask,
            update.value_clip_range,
            num_tokens,
        )
        assert output.entropy is not None  # asked for above
        entropy = (masked_sum(output.entropy, part.mask) / num_tokens).float()
        trainer.backward(None if warming_up else surrogate - update.entropy_coef * entropy, update.value_coef * error)
        total_policy += float(surrogate.detach())
        total_value += float(error.detach())
        total_entropy += float(entropy.detach())
        policy = policy_stats if policy is None else policy + policy_stats
        value = value_stats if value is None else value + value_stats
    assert policy is not None  # Every rank has a microbatch of every minibatch.
    assert value is not None
    policy_sum, value_sum, entropy_sum = ranks.add(
        tensor([total_policy, total_value, total_entropy], dtype=float64)
    ).tolist()
    return MinibatchReport(
        policy_loss=policy_sum,
        value_loss=value_sum,
        entropy=entropy_sum,
        policy=policy.over_ranks(ranks.group),
        value=value.over_ranks(ranks.group),
        grad_norm=math.nan,
        value_grad_norm=math.nan,
        applied=False,
        learning_rate=math.nan,
        value_learning_rate=math.nan,
    )


def _step(trainer: TrainEngine, report: MinibatchReport) -> MinibatchReport:
    if not all(map(math.isfinite, (report.policy_loss, report.value_loss, report.entropy))):
        trainer.discard_gradients()
        return report
    step = trainer.step()
    return replace(
        report,
        grad_norm=step.grad_norm,
        value_grad_norm=step.value_grad_norm,
        applied=step.applied,
        learning_rate=step.learning_rate,
        value_learning_rate=step.value_learning_rate,
    )


def _skipped(batch: PPOBatch, parts: list[Microbatch], report: MinibatchReport, epoch: int, step: int) -> SkippedStep:
    rows = cat([part.rows for part in parts])
    tensors = {
        "input_ids": batch.rollout.input_ids,
        "attention_mask": batch.rollout.attention_mask,
        "response_mask": batch.rollout.response_mask,
        "old_logprobs": batch.old.logprobs,
        "old_values": batch.old.values,
        "advantages": batch.advantages,
        "returns": batch.returns,
    }
    kept = {name: tensor[rows] for name, tensor in tensors.items()}
    sets = batch.rollout.token_sets_of(rows)
    if sets is not None:
        kept.update({f"{sets.listed}_ids": sets.ids, f"{sets.listed}_counts": sets.counts})
    return SkippedStep(epoch, step, report.policy_loss, report.value_loss, report.grad_norm, kept)


def _check_ratio(report: MinibatchReport, old: PassSettings, new: PassSettings, spec: RunSpec, iteration: int) -> None:
    deviation = float(report.policy.max_ratio_deviation)
    tolerance = spec.update.ratio_tolerance
    changed = [
        f"{name} {before} -> {after}"
        for name, before, after in (
            ("attention kernel", old.attention_kernel, new.attention_kernel),
            ("dropout", old.dropout, new.dropout),
            ("training mode", old.training_mode, new.training_mode),
            ("dtype", old.dtype, new.dtype),
            ("row layout", old.layout, new.layout),
        )
        if before != after
    ]
    # `not <=` so that NaN fails too.
    if not deviation <= tolerance or changed:
        between = f"; between the two passes changed: {', '.join(changed)}" if changed else ""
        raise RatioError(
            f"iteration {iteration}: before any update max |ratio - 1| is {deviation:.4g}, expected at most "
            f"{tolerance:g}{between}"
        )
