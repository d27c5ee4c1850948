"""One PPO iteration, from prompts to a synced engine, readable top to bottom.

Each line is one idea of the method; each callee is a small function of its own module. Data moves forward: every
stage returns a new frozen record. It knows neither the journal nor who listens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ppo_core.advantages import gae
from ppo_core.control import Control
from ppo_core.data.prompts import PromptBatch
from ppo_core.kl_controller import KLUpdate, update_kl_coef
from ppo_core.masked import masked_whiten
from ppo_core.models.policy import PolicyModel
from ppo_core.ranks import ALONE, Ranks
from ppo_core.rewards import per_token_rewards
from ppo_core.rollout.batch import Rollout, assemble
from ppo_core.rollout.engine import RolloutEngine, SyncReport
from ppo_core.score_shaping import RunningMoments, ShapedScores, shape_scores
from ppo_core.scoring.combine import Scores
from ppo_core.scoring.shared import BatchScorer
from ppo_core.seeds import derived_seed
from ppo_core.spec import RunSpec
from ppo_core.stopwatch import Stopwatch
from ppo_core.training.engine import TrainEngine
from ppo_core.training.passes import OldPass, forward_logprobs, forward_policy
from ppo_core.training.updates import PPOBatch, UpdateReport, run_updates


@dataclass(frozen=True)
class Models:
    """Everything that computes: the trained policy, its frozen reference, the reward, and the rollout engine."""

    trainer: TrainEngine
    reference: PolicyModel
    reward: BatchScorer
    engine: RolloutEngine
    pad_id: int
    decode: Callable[[list[int]], str]
    ranks: Ranks = ALONE


@dataclass(frozen=True)
class Progress:
    """Where the run stands before an iteration, as far as the iteration depends on it."""

    iteration: int
    policy_version: int
    kl_coef: float
    skipped_in_a_row: int
    score_moments: RunningMoments


@dataclass(frozen=True)
class IterationReport:
    """All records of one iteration. `sampled` is the whole rollout; `rollout` its rows with a usable score."""

    progress: Progress
    sampled: Rollout
    all_scores: Scores
    rollout: Rollout
    scores: ShapedScores
    old: OldPass
    ref_logprobs: Tensor
    rewards: Tensor
    kl_to_ref: Tensor
    advantages: Tensor
    returns: Tensor
    kl_update: KLUpdate
    update: UpdateReport
    sync: SyncReport
    gamma: float
    rows_at_once: int  #: responses generated at once: all, or fewer since generation ran out of memory


def run_iteration(
    models: Models, prompts: PromptBatch, spec: RunSpec, progress: Progress, control: Control, watch: Stopwatch
) -> IterationReport:
    """One PPO iteration: roll out, score, shape rewards, estimate advantages, update, sync weights.

    Up to the update nothing has changed, so a stop is honoured by leaving the iteration; from there on it is finished.

    Raises:
        Interrupted: a stop or pause was asked before the update began; the run stands as before this iteration.
        RewardError: too many scores could not be used.
        RatioError: the policy does not repeat its own logprobs; no step has been made.
        NonFiniteError: too many optimizer steps in a row were not finite.
        WeightSyncError: the engine does not hold what was sent.
    """
    with watch.phase("rollout"):
        rows = range(len(prompts.prompt_ids))
        seeds = [derived_seed(spec.data_seed, "rollout", progress.iteration, row) for row in rows]
        responses = models.engine.generate(prompts.prompt_ids, seeds=seeds, check=control.check)
        sampled = assemble(prompts, responses, models.pad_id, models.decode, models.engine.version)
        models.engine.rest()  # What it holds on a GPU that both share is the trainer's until the sync.
    with watch.phase("scoring"):
        all_scores = models.reward.score(sampled.prompt_texts, sampled.response_texts, control.check)
        control.check_together()
        usable = all_scores.valid.nonzero().flatten()
        rollout, raw = sampled.select(usable), all_scores.values[usable].float()
        scores = shape_scores(raw, rollout.response_length, rollout.truncated, progress.score_moments, spec.reward)
    with watch.phase("logprobs"):  # the trainer's own numbers, never the engine's
        old = forward_policy(models.trainer, rollout, spec, control.check_together, models.ranks)
        ref_logprobs = forward_logprobs(models.reference, rollout, old.plan, spec, control.check_together, models.ranks)
    with watch.phase("update"):
        # The missing-EOS penalty is in the shaped score already.
        rewards, kl_to_ref = per_token_rewards(
            scores.trained, old.logprobs, ref_logprobs, rollout.response_mask, progress.kl_coef, spec.kl.estimator
        )
        advantages, returns = gae(rewards, old.values, rollout.response_mask, spec.gae.gamma, spec.gae.lam)
        # For the next iteration: this one's rewards are charged the coefficient that it began with.
        kl_update = update_kl_coef(
            progress.kl_coef, old.logprobs, ref_logprobs, rollout.response_mask, progress.iteration, spec
        )
        batch = PPOBatch(rollout, old, masked_whiten(advantages, rollout.response_mask), returns)
        update = run_updates(models.trainer, batch, spec, progress.iteration, progress.skipped_in_a_row, models.ranks)
    with watch.phase("sync"):  # verified: digest, version, probe logprobs
        sync = models.engine.sync_weights(models.trainer.weights(), models.trainer.probe(), progress.policy_version + 1)
    return IterationReport(
        progress=progress,
        sampled=sampled,
        all_scores=all_scores,
        rollout=rollout,
        scores=scores,
        old=old,
        ref_logprobs=ref_logprobs,
        rewards=rewards,
        kl_to_ref=kl_to_ref,
        advantages=advantages,
        returns=returns,
        kl_update=kl_update,
        update=update,
        sync=sync,
        gamma=spec.gae.gamma,
        rows_at_once=min(models.engine.rows_at_once or sampled.num_rows, sampled.num_rows),
    )
