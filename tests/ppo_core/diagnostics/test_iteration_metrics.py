"""Every metric of an iteration against an answer worked out by hand, from a rollout of three rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ppo_core import registry
from ppo_core.checkpoints import TrainerState
from ppo_core.data.prompts import PromptBatch
from ppo_core.diagnostics.iteration_metrics import held_out_metrics, iteration_metrics, peak_memory_gib
from ppo_core.evaluation.gate import judge_verdict, paired_rise, win_rate
from ppo_core.evaluation.held_out import Answers
from ppo_core.iteration import IterationReport, Progress
from ppo_core.kl_controller import KLUpdate
from ppo_core.losses import PolicyStats, ValueStats
from ppo_core.rollout.batch import Rollout, assemble
from ppo_core.rollout.engine import Response, SyncReport
from ppo_core.score_shaping import RunningMoments, ShapedScores
from ppo_core.scoring.combine import Scores
from ppo_core.training.engine import PassSettings
from ppo_core.training.passes import OldPass
from ppo_core.training.updates import MinibatchReport, UpdateReport

SETTINGS = PassSettings("sdpa", 0.0, False, "torch.float32", "padded")


def made_sample() -> Rollout:
    """Three rows, prompts of one token: 2 tokens and an end, 3 and cut off, and one without a usable score."""
    responses = [
        Response([5, 6, 2], "stop", [-1.0, -2.0, -0.5]),
        Response([5, 5, 5, 5], "length", [-1.0, -1.0, -1.0, -1.0]),
        Response([2], "stop", [-3.0]),
    ]
    batch = PromptBatch([[1], [1], [1]], ["a", "a", "a"], [0, 1, 2])
    return assemble(batch, responses, 0, lambda ids: " ".join(map(str, ids)), 6)


def grid(*rows: list[float], junk: float = math.nan) -> Tensor:
    """[B, 4], what is not given is rubbish that must not matter."""
    return torch.tensor([row + [junk] * (4 - len(row)) for row in rows])


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def policy_stats(num: float, ratio_sum: float, largest: float, kl: float, clipped: float) -> PolicyStats:
    return PolicyStats(
        num_tokens=scalar(num),
        ratio_sum=scalar(ratio_sum),
        ratio_max=scalar(largest),
        max_ratio_deviation=scalar(largest - 1),
        approx_kl_sum=scalar(kl),
        num_clipped=scalar(clipped),
        num_clipped_active=scalar(clipped - 1),
        num_log_ratio_clamped=scalar(1),
    )


def minibatch(policy: PolicyStats, loss: float, entropy: float, grad_norm: float, rate: float) -> MinibatchReport:
    return MinibatchReport(
        policy_loss=loss,
        value_loss=2 * loss,
        entropy=entropy,
        policy=policy,
        value=ValueStats(policy.num_tokens, scalar(1)),
        grad_norm=grad_norm,
        value_grad_norm=grad_norm / 2,
        applied=True,
        learning_rate=rate,
        value_learning_rate=10 * rate,
    )


@pytest.fixture(scope="module")
def metrics() -> dict[str, float | None]:
    sampled = made_sample()
    rollout = sampled.select(torch.tensor([0, 1]))
    scores = Scores(
        values=torch.tensor([1.0, 3.0, math.nan], dtype=torch.float64),
        valid=torch.tensor([True, True, False]),
        scored=torch.tensor([True, True, False]),
        parts=(torch.tensor([2.0, 6.0, math.nan], dtype=torch.float64),),
        reasons={"nan": 1},
    )
    old_logprobs = grid([-1.0, -2.0, -1.0], [-1.0, -1.5, -1.0, -1.0])
    ref_logprobs = grid([-1.5, -2.0, -1.0], [-1.0, -1.0, -1.0, -1.0])
    # One token above the reference by half a nat, one below by as much: k1 sums to 0 and k3 to 2 cosh(1/2) - 2.
    report = IterationReport(
        progress=Progress(7, policy_version=6, kl_coef=0.05, skipped_in_a_row=0, score_moments=RunningMoments()),
        sampled=sampled,
        all_scores=scores,
        rollout=rollout,
        scores=ShapedScores(
            raw=torch.tensor([1.0, 3.0]),
            corrected=torch.tensor([1.5, 2.5]),
            normalized=torch.tensor([-1.0, 2.0]),
            penalized=torch.tensor([1.0, 2.0]),
            trained=torch.tensor([1.0, 1.5]),
            length_slope=0.75,
            moments=RunningMoments(count=4, mean=2.5, squares=36.0),
        ),
        old=OldPass(old_logprobs, grid([0.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0]), (), SETTINGS),
        ref_logprobs=ref_logprobs,
        rewards=grid([0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 2.0]),
        kl_to_ref=grid([0.5, 0.0, 0.0], [0.0, -0.5, 0.0, 0.0]),
        advantages=grid([1.0, 0.0, -1.0], [1.0, 1.0, 1.0, 1.0]),
        returns=grid([1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0]),
        kl_update=KLUpdate(error=-0.4, coef=0.049),
        update=UpdateReport(
            epochs=(
                (minibatch(policy_stats(3, 3.0, 1.0, 0.0, 1), -0.1, 4.0, 1.0, 1e-4),),
                (minibatch(policy_stats(4, 5.0, 2.0, 0.7, 2), -0.3, 2.0, 3.0, 5e-5),),
            ),
            num_steps=2,
            skipped=(),
            num_empty=1,
            skipped_in_a_row=0,
            stopped_at_target_kl=False,
        ),
        sync=SyncReport(7, "digest", 1e-6),
        gamma=1.0,
        rows_at_once=2,
    )
    seconds = {"rollout": 2.0, "scoring": 0.5, "logprobs": 0.5, "update": 4.0, "sync": 1.0, "iteration": 10.0}
    state = TrainerState(iteration=7, cursor=20, prompts_trained=13, prompts_filtered=10, prompts_failed=1)
    return iteration_metrics(report, state, seconds, limit_s=2.0, peak_gib=1.5)


K3 = 2 * math.cosh(0.5) - 2

KNOWN = {
    "memory/peak_gib": 1.5,
    "reward/score_mean": 2.0,
    "reward/score_std": 1.0,
    "reward/length_slope": 0.75,
    "reward/corrected_mean": 2.0,
    "reward/corrected_std": 0.5,
    "reward/running_mean": 2.5,
    "reward/running_std": 3.0,
    "reward/normalized_mean": 0.5,
    "reward/normalized_std": 1.5,
    "reward/penalized_mean": 1.5,
    "reward/penalized_std": 0.5,
    "reward/trained_mean": 1.25,
    "reward/trained_std": 0.25,
    "reward/total_mean": 1.5,
    "reward/source_mean/0": 4.0,
    "reward/invalid/nan": 1.0,
    "kl/ref_token": 0.0,
    "kl/ref_sequence": 0.0,
    "kl/ref_token_k3": K3 / 7,
    "kl/ref_sequence_k3": K3 / 2,
    "kl/coef": 0.05,
    "kl/target_error": -0.4,
    "policy/loss": -0.2,
    "policy/approx_kl": 0.1,
    "policy/approx_kl/epoch_1": 0.0,
    "policy/approx_kl/epoch_2": 0.175,
    "policy/clip_fraction": 3 / 7,
    "policy/clip_fraction/epoch_1": 1 / 3,
    "policy/clip_fraction/epoch_2": 0.5,
    "policy/clip_fraction_active": 1 / 7,
    "policy/ratio_mean": 8 / 7,
    "policy/ratio_max": 2.0,
    "policy/log_ratio_clamped": 2.0,
    "policy/first_minibatch_ratio": 1.0,
    "policy/first_minibatch_ratio_max_dev": 0.0,
    "policy/first_minibatch_clip_fraction": 1 / 3,
    "policy/entropy": (4.0 * 3 + 2.0 * 4) / 7,
    "policy/grad_norm": 2.0,
    "value/loss": -0.4,
    "value/clip_fraction": 2 / 7,
    # Errors 1 0 -1 1 1 1 1: variance (6 - 16/7) / 7; returns 1 1 1 2 2 2 2: variance 12/49.
    "value/explained_variance": 1 - ((6 - 16 / 7) / 7) / (12 / 49),
    "value/explained_variance_return": 1 - ((6 - 16 / 7) / 7) / (12 / 49),
    "value/mean": 1.0,
    "value/return_mean": 11 / 7,
    "value/grad_norm": 1.0,
    "advantage/mean": 4 / 7,
    "advantage/std": math.sqrt(6 / 7 - (4 / 7) ** 2),
    "response/length_mean": 8 / 3,
    "response/length_p50": 3.0,
    "response/length_p95": 3.9,
    "response/eos_rate": 2 / 3,
    "response/distinct_2": 3 / 5,  # 56 62 55 55 55
    "response/repeat_3": 1 / 3,  # 562 555 555
    "response/identical": 0.0,
    "response/empty": 1.0,
    "response/invalid": 1.0,
    "rollout/policy_version": 6.0,
    "rollout/rows_at_once": 2.0,
    "rollout/engine_gap_mean": 1.0 / 7,  # half a nat at two tokens of seven
    "rollout/engine_gap_max": 0.5,
    "rollout/engine_gap_k3": 2 * (math.expm1(-0.5) + 0.5) / 7,
    "optimizer/learning_rate": 5e-5,
    "optimizer/value_learning_rate": 5e-4,
    "optimizer/steps": 2.0,
    "optimizer/skipped": 0.0,
    "optimizer/empty_minibatches": 1.0,
    "data/prompts_trained": 13.0,
    "data/prompts_filtered": 10.0,
    "data/prompts_failed": 1.0,
    "data/response_tokens": 7.0,
    "time/rollout_s": 2.0,
    "time/score_s": 0.5,
    "time/logprobs_s": 0.5,
    "time/update_s": 4.0,
    "time/sync_s": 1.0,
    "time/evaluation_s": 0.0,
    "time/iteration_s": 10.0,
    "throughput/response_tokens_per_s": 4.0,
    "throughput/trained_tokens_per_s": 0.7,
    "limit/fraction": 0.25,
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_metric_has_its_known_answer(metrics: dict[str, float | None], name: str) -> None:
    assert metrics[name] == pytest.approx(KNOWN[name], abs=1e-6)


def test_no_metric_is_without_a_known_answer(metrics: dict[str, float | None]) -> None:
    assert set(metrics) == set(KNOWN)
    assert 0.01 < peak_memory_gib() < 100


HELD_OUT_KNOWN = {
    "heldout/score_mean": 2.0,
    "heldout/score_std": 1.0,
    "heldout/length_mean": 7 / 3,
    "heldout/eos_rate": 2 / 3,
    "heldout/distinct_2": 3 / 4,  # 56 62 56 65
    "judge/score_mean": 0.1,
}
# Of four answers two are better than the last gate's, one is as good, one is worse: 2.5 of 4. With z² = 3.841459 the
# interval is (0.625 + 0.480182 ± sqrt(0.625 · 0.375 · 0.960365 + 0.230575)) / 1.960365. Against the start 3.5 of 4, and
# (0.875 + 0.480182 ± sqrt(0.875 · 0.125 · 0.960365 + 0.230575)) / 1.960365.
GATE_KNOWN = {
    "judge/win_rate": 0.625,
    "judge/win_rate_low": 0.219424,
    "judge/win_rate_high": 0.908103,
    "judge/win_rate_vs_start": 0.875,
    "judge/win_rate_vs_start_low": 0.395773,
    "judge/win_rate_vs_start_high": 0.986809,
}


def test_held_out_metrics_have_known_answers() -> None:
    answers = Answers(
        prompts=["a", "a", "a"],
        responses=["x", "y", "z"],
        ids=[[5, 6, 2], [5, 6, 5], [5]],
        finish_reasons=["stop", "length", "stop"],
        scores=[1.0, 3.0, None],
        judge_scores=[0.5, -0.5, 0.3],
        policy_version=4,
    )
    assert held_out_metrics(answers) == pytest.approx(HELD_OUT_KNOWN)


def test_gate_metrics_have_known_answers() -> None:
    now = [2.0, 2.0, 2.0, 0.0]
    against_last, against_start = win_rate(now, [1.0, 1.0, 2.0, 3.0]), win_rate(now, [0.0, 0.0, 0.0, 0.0])
    verdict = judge_verdict(paired_rise([1.0] * 4, [0.0] * 4), against_last, against_start, 0)
    assert verdict.metrics() == pytest.approx(GATE_KNOWN, abs=1e-5)


@pytest.mark.parametrize("name", registry.METRICS)
def test_every_metric_of_the_registry_has_a_known_answer(name: str) -> None:
    assert name in {registry.metric(known).name for known in (*KNOWN, *HELD_OUT_KNOWN, *GATE_KNOWN)}
