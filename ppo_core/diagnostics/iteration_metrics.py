"""From the records of an iteration to its metrics, by registry key. Each is computed here once, and nowhere else."""

from __future__ import annotations

import functools
import resource
from collections.abc import Sequence

import torch
from torch import Tensor

from ppo_core.advantages import gae
from ppo_core.checkpoints import TrainerState
from ppo_core.diagnostics.statistics import explained_variance
from ppo_core.diagnostics.text import distinct_2, identical, repeat_3
from ppo_core.evaluation.held_out import Answers
from ppo_core.iteration import IterationReport
from ppo_core.limit import limit_fraction
from ppo_core.losses import PolicyStats, ValueStats
from ppo_core.masked import masked_max, masked_mean, masked_quantile, masked_row_sum, masked_std
from ppo_core.rewards import kl_penalty
from ppo_core.training.updates import MinibatchReport

Metrics = dict[str, float | None]


def iteration_metrics(
    report: IterationReport,
    state: TrainerState,
    seconds: dict[str, float],
    limit_s: float | None,
    peak_gib: float,
) -> Metrics:
    """Every metric of one iteration; None where one is undefined.

    Args:
        report: the iteration's records.
        state: the run's counters after the iteration.
        seconds: seconds by phase, `iteration` among them.
        limit_s: seconds that the iteration's arithmetic takes at the measured speed; None where it is not known.
        peak_gib: largest memory that a rank has held.
    """
    return {
        **_reward(report),
        **_kl(report),
        **_policy(report),
        **_value(report),
        **_response(report),
        **_engine(report),
        "optimizer/learning_rate": _last_rate(report),
        "optimizer/value_learning_rate": _last_rate(report, value=True),
        "optimizer/steps": float(report.update.num_steps),
        "optimizer/skipped": float(len(report.update.skipped)),
        "optimizer/empty_minibatches": float(report.update.num_empty),
        "data/prompts_trained": float(state.prompts_trained),
        "data/prompts_filtered": float(state.prompts_filtered),
        "data/prompts_failed": float(state.prompts_failed),
        "data/response_tokens": float(report.rollout.response_mask.count_nonzero()),
        **_time(report, seconds, limit_s),
        "memory/peak_gib": peak_gib,
    }


def held_out_metrics(answers: Answers) -> Metrics:
    """Metrics of an evaluation on held-out prompts."""
    scores = torch.tensor([score for score in answers.scores if score is not None])
    lengths = torch.tensor([float(len(ids)) for ids in answers.ids])
    ended = torch.tensor([float(reason == "stop") for reason in answers.finish_reasons])
    metrics: Metrics = {
        "heldout/score_mean": _mean(scores),
        "heldout/score_std": _std(scores),
        "heldout/length_mean": _mean(lengths),
        "heldout/eos_rate": _mean(ended),
        "heldout/distinct_2": distinct_2(answers.ids),
    }
    if answers.judge_mean is not None:
        metrics["judge/score_mean"] = answers.judge_mean
    return metrics


def _reward(report: IterationReport) -> Metrics:
    scores, totals = report.scores, masked_row_sum(report.rewards, report.rollout.response_mask)
    metrics: Metrics = {
        "reward/score_mean": _mean(scores.raw),
        "reward/score_std": _std(scores.raw),
        "reward/length_slope": scores.length_slope,
        "reward/corrected_mean": _mean(scores.corrected),
        "reward/corrected_std": _std(scores.corrected),
        "reward/running_mean": scores.moments.mean,
        "reward/running_std": scores.moments.deviation,
        "reward/normalized_mean": _mean(scores.normalized),
        "reward/normalized_std": _std(scores.normalized),
        "reward/penalized_mean": _mean(scores.penalized),
        "reward/penalized_std": _std(scores.penalized),
        "reward/trained_mean": _mean(scores.trained),
        "reward/trained_std": _std(scores.trained),
        "reward/total_mean": _mean(totals),
    }
    for index, part in enumerate(report.all_scores.parts):
        metrics[f"reward/source_mean/{index}"] = _mean(part[report.all_scores.scored])
    for reason, count in report.all_scores.reasons.items():
        metrics[f"reward/invalid/{reason}"] = float(count)
    return metrics


def _kl(report: IterationReport) -> Metrics:
    mask = report.rollout.response_mask
    k1 = kl_penalty(report.old.logprobs, report.ref_logprobs, "k1")
    k3 = kl_penalty(report.old.logprobs, report.ref_logprobs, "k3")
    return {
        "kl/ref_token": float(masked_mean(k1, mask)),
        "kl/ref_sequence": _mean(masked_row_sum(k1, mask)),
        "kl/ref_token_k3": float(masked_mean(k3, mask)),
        "kl/ref_sequence_k3": _mean(masked_row_sum(k3, mask)),
        "kl/coef": report.progress.kl_coef,
        "kl/target_error": report.kl_update.error,
    }


def _policy(report: IterationReport) -> Metrics:
    applied = _applied(report.update.minibatches)
    first = report.update.minibatches[0].policy if report.update.minibatches else None
    whole = _joined([each.policy for each in applied])
    metrics: Metrics = {
        "policy/loss": _over_steps([each.policy_loss for each in applied]),
        "policy/approx_kl": float(whole.approx_kl) if whole else None,
        "policy/clip_fraction": float(whole.clip_fraction) if whole else None,
        "policy/clip_fraction_active": float(whole.clip_fraction_active) if whole else None,
        "policy/ratio_mean": float(whole.ratio_mean) if whole else None,
        "policy/ratio_max": float(whole.ratio_max) if whole else None,
        "policy/log_ratio_clamped": float(whole.num_log_ratio_clamped) if whole else None,
        "policy/first_minibatch_ratio": float(first.ratio_mean) if first else None,
        "policy/first_minibatch_ratio_max_dev": float(first.max_ratio_deviation) if first else None,
        "policy/first_minibatch_clip_fraction": float(first.clip_fraction) if first else None,
        "policy/entropy": _by_tokens([(each.entropy, each.num_tokens) for each in applied]),
        "policy/grad_norm": _over_steps([each.grad_norm for each in applied]),
    }
    for number, epoch in enumerate(report.update.epochs, start=1):
        stats = _joined([each.policy for each in _applied(epoch)])
        metrics[f"policy/approx_kl/epoch_{number}"] = float(stats.approx_kl) if stats else None
        metrics[f"policy/clip_fraction/epoch_{number}"] = float(stats.clip_fraction) if stats else None
    return metrics


def _value(report: IterationReport) -> Metrics:
    mask = report.rollout.response_mask
    applied = _applied(report.update.minibatches)
    whole: ValueStats | None = (
        functools.reduce(lambda a, b: a + b, (each.value for each in applied)) if applied else None
    )
    # With lambda = 1 the advantage is the plain return minus the value, so the "returns" are the plain returns.
    _, plain_returns = gae(report.rewards, report.old.values, mask, report.gamma, 1.0)
    return {
        "value/loss": _over_steps([each.value_loss for each in applied]),
        "value/clip_fraction": float(whole.clip_fraction) if whole else None,
        "value/explained_variance": explained_variance(report.old.values, report.returns, mask),
        "value/explained_variance_return": explained_variance(report.old.values, plain_returns, mask),
        "value/mean": float(masked_mean(report.old.values, mask)),
        "value/return_mean": float(masked_mean(report.returns, mask)),
        "value/grad_norm": _over_steps([each.value_grad_norm for each in applied]),
        "advantage/mean": float(masked_mean(report.advantages, mask)),
        "advantage/std": float(masked_std(report.advantages, mask)),
    }


def _response(report: IterationReport) -> Metrics:
    sampled = report.sampled
    ids = [sampled.response_ids(row) for row in range(sampled.num_rows)]
    lengths = sampled.response_length.double()
    return {
        "response/length_mean": _mean(lengths),
        "response/length_p50": _quantile(lengths, 0.5),
        "response/length_p95": _quantile(lengths, 0.95),
        "response/eos_rate": _mean((~sampled.truncated).float()),
        "response/distinct_2": distinct_2(ids),
        "response/repeat_3": repeat_3(ids),
        "response/identical": identical(ids),
        "response/empty": float(sampled.num_empty),
        "response/invalid": float((~report.all_scores.scored).count_nonzero()),
    }


def _engine(report: IterationReport) -> Metrics:
    """The gap between what the engine says it sampled with and what the trainer computes for the same tokens."""
    engine, mask = report.rollout.engine_logprobs, report.rollout.response_mask
    gap = kl_penalty(engine, report.old.logprobs, "k1")
    return {
        "rollout/policy_version": float(report.rollout.policy_version),
        "rollout/rows_at_once": float(report.rows_at_once),
        "rollout/engine_gap_mean": float(masked_mean(gap.abs(), mask)),
        "rollout/engine_gap_max": float(masked_max(gap.abs(), mask)),
        "rollout/engine_gap_k3": float(masked_mean(kl_penalty(engine, report.old.logprobs, "k3"), mask)),
    }


def _time(report: IterationReport, seconds: dict[str, float], limit_s: float | None) -> Metrics:
    generated = float(report.sampled.response_length.sum())
    trained = float(report.rollout.response_mask.count_nonzero())
    phases = ("rollout", "logprobs", "update", "sync", "evaluation", "iteration")
    metrics: Metrics = {f"time/{phase}_s": seconds.get(phase, 0.0) for phase in phases}
    work_s = sum(seconds.get(phase, 0.0) for phase in ("rollout", "scoring", "logprobs", "update", "sync"))
    return {
        **metrics,
        "time/score_s": seconds.get("scoring", 0.0),
        "throughput/response_tokens_per_s": generated / seconds["rollout"],
        "throughput/trained_tokens_per_s": trained / seconds["iteration"],
        "limit/fraction": None if limit_s is None else limit_fraction(limit_s, work_s),
    }


def peak_memory_gib() -> float:
    """The most memory that this process has held, GiB: of its GPU where it has one, else of the machine."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _last_rate(report: IterationReport, value: bool = False) -> float | None:
    applied = _applied(report.update.minibatches)
    if not applied:
        return None
    return applied[-1].value_learning_rate if value else applied[-1].learning_rate


def _applied(minibatches: Sequence[MinibatchReport]) -> list[MinibatchReport]:
    """Those that were a step: a skipped one is counted, and its NaN would hide what the others say."""
    return [each for each in minibatches if each.applied]


def _joined(stats: Sequence[PolicyStats]) -> PolicyStats | None:
    return functools.reduce(lambda a, b: a + b, stats) if stats else None


def _over_steps(values: Sequence[float]) -> float | None:
    return _mean(torch.tensor(values, dtype=torch.float64)) if values else None


def _by_tokens(pairs: Sequence[tuple[float, float]]) -> float | None:
    tokens = sum(count for _, count in pairs)
    return sum(value * count for value, count in pairs) / tokens if tokens else None


def _mean(values: Tensor) -> float | None:
    return float(masked_mean(values, torch.ones_like(values, dtype=torch.bool))) if values.numel() else None


def _std(values: Tensor) -> float | None:
    return float(masked_std(values, torch.ones_like(values, dtype=torch.bool))) if values.numel() else None


def _quantile(values: Tensor, q: float) -> float:
    return float(masked_quantile(values, torch.ones_like(values, dtype=torch.bool), q))
