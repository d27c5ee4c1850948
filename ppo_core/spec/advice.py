"""Settings that are allowed and yet likely to disappoint: one sentence each, with the numbers and a remedy."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ppo_core.registry import Band, metric
from ppo_core.spec.groups import MAX_KL_ERROR
from ppo_core.spec.run_spec import RunSpec
from ppo_core.spec.watching import AlertBand

MANY_EPOCHS = 4
FEW_ROWS = 4
# A clip below this share of the scores' spread needs ten and more iterations to follow one score.
SMALL_CLIP = 0.1
# A slope through n responses takes 1 / (n - 1) of the scores' variance for length where there is no such thing.
FEW_ROWS_FOR_SLOPE = 16
# Half of the interval of a win rate of one half is then 0.09.
FEW_GATE_PROMPTS = 128
# A KL coefficient that cannot move by more than this in a whole run might as well be fixed.
SMALL_MOVE = 0.1


def warnings_of(spec: RunSpec) -> tuple[str, ...]:
    """Every warning that a checked spec gives rise to, before any model or file is looked at."""
    return tuple(
        warning
        for part in (_update(spec), _reward(spec), _kl(spec), _watching(spec), _saving(spec))
        for warning in part
    )


def value_clip_warning(value_clip_range: float | None, score_spread: float) -> str | None:
    """A warning when the value clip is small against the spread of the scores; None when it is not.

    Args:
        value_clip_range: the spec's; None is no clip.
        score_spread: how far scores lie apart, such as their standard deviation.
    """
    if value_clip_range is None or value_clip_range >= SMALL_CLIP * score_spread:
        return None
    return (
        f"update.value_clip_range is {value_clip_range:g} but scores spread over about {score_spread:.3g}: the critic "
        "can follow only by that much an iteration; raise it or set it to null"
    )


def _update(spec: RunSpec) -> Iterator[str]:
    update = spec.update
    if update.epochs > MANY_EPOCHS:
        yield f"update.epochs is {update.epochs}: above {MANY_EPOCHS}, KL rises for little gain; lower it"
    rows = spec.rollout.batch_size // update.minibatches
    if rows < FEW_ROWS:
        yield (
            f"rollout.batch_size {spec.rollout.batch_size} / update.minibatches {update.minibatches} leaves {rows} "
            "responses for one optimizer step, so its gradient is mostly noise; lower update.minibatches"
        )
    if update.warmup_steps >= spec.num_optimizer_steps:
        yield (
            f"update.warmup_steps is {update.warmup_steps} but the run has {spec.num_optimizer_steps} optimizer steps: "
            "the learning rate is never reached; lower it"
        )
    learning = spec.iterations - update.critic_warmup_iterations
    if learning <= spec.iterations // 2:
        yield (
            f"update.critic_warmup_iterations is {update.critic_warmup_iterations} of {spec.iterations} iterations: "
            + (f"the policy learns in {learning} only" if learning > 0 else "the policy never learns")
            + "; lower it"
        )
    longest = spec.data.max_prompt_tokens + spec.rollout.max_new_tokens
    if update.token_budget < longest:
        yield (
            f"update.token_budget is {update.token_budget} but a row may have {longest} tokens: such rows stand "
            "alone in their microbatch and need more memory than the budget says"
        )


def _reward(spec: RunSpec) -> Iterator[str]:
    reward = spec.reward
    warning = value_clip_warning(spec.update.value_clip_range, _score_spread(spec))
    if warning:
        yield warning
    if reward.missing_eos_penalty == 0:
        yield "reward.missing_eos_penalty is 0: an endless answer costs nothing, so answers may grow; set it below 0"
    elif reward.clip is not None and reward.clip < -reward.missing_eos_penalty:
        yield (
            f"reward.clip {reward.clip:g} is smaller than the missing-EOS penalty {reward.missing_eos_penalty:g} and "
            "hides part of it; raise reward.clip"
        )
    if all(source.weight == 0 for source in reward.sources):
        yield "all reward.sources have weight 0: every score is 0 and nothing is learned; give one a weight"
    if reward.length_baseline == "linear" and spec.rollout.batch_size < FEW_ROWS_FOR_SLOPE:
        yield (
            f"reward.length_baseline is linear but rollout.batch_size is {spec.rollout.batch_size}: a slope through so "
            "few responses is mostly noise; raise rollout.batch_size"
        )


def _score_spread(spec: RunSpec) -> float:
    """How far scores lie apart, as far as the spec alone tells: 1 once they are normalised, or else the most that the
    penalty or the limit leaves room for."""
    reward = spec.reward
    penalty = abs(reward.missing_eos_penalty)
    if reward.normalize:
        return min(max(penalty, 1.0), reward.clip or math.inf)
    return max(penalty, reward.clip or 0.0)


def _kl(spec: RunSpec) -> Iterator[str]:
    if spec.kl.coef == 0:
        yield "kl.coef is 0: nothing holds the policy near its reference; raise it unless that is meant"
    if spec.kl.horizon is not None:
        responses = spec.iterations * spec.rollout.batch_size
        move = MAX_KL_ERROR * responses / spec.kl.horizon
        if move < SMALL_MOVE:
            yield (
                f"kl.horizon is {spec.kl.horizon} but the run has {responses} responses: in all of it kl.coef can move "
                f"by about {move:.1%}; lower kl.horizon"
            )


def _watching(spec: RunSpec) -> Iterator[str]:
    if spec.gate.judge is None:
        yield "no judge: nothing watches for reward hacking; set gate.judge and data.held_out"
    else:
        if spec.gate.every > spec.iterations:
            yield f"gate.every is {spec.gate.every} but the run has {spec.iterations} iterations: the gate never looks"
        if spec.gate.prompts < FEW_GATE_PROMPTS:
            yield (
                f"gate.prompts is {spec.gate.prompts}: a win rate of one half is then uncertain by "
                f"± {win_rate_spread(spec.gate.prompts):.2f}; "
                f"{FEW_GATE_PROMPTS} and more tell small losses"
            )
    if spec.data.held_out is None:
        yield "no data.held_out: scores are only ever of prompts that were trained on"
    for name, own in spec.alerts.bands.items():
        band = metric(name).band
        if own is not None and band is not None:
            yield from _band(name, own, band)


def _band(name: str, own: AlertBand, band: Band) -> Iterator[str]:
    """Bounds that leave out what is usual for the run: most often meant as bounds of the value itself."""
    if band.relative_to is None:
        return
    usual = 1.0 if band.measure == "factor" else 0.0
    for bound in ("red_low", "low", "high", "red_high"):
        given = getattr(own, bound)
        if given is not None and (given > usual if bound.endswith("low") else given < usual):
            example = ", ".join(f"{name}: {value:g}" for name, value in band.bounds.items())
            yield (
                f"alerts.bands.{name}.{bound} is {given:g}, a bound of {band.measured}: what is usual for the run lies "
                f"outside; by itself the metric has {{{example}}}"
            )
            return


def win_rate_spread(num_prompts: int) -> float:
    """Half of the 95 % interval of a win rate of one half."""
    return 1.96 * 0.5 / math.sqrt(num_prompts)


def _saving(spec: RunSpec) -> Iterator[str]:
    if spec.checkpoints.every > spec.iterations:
        yield (
            f"checkpoints.every is {spec.checkpoints.every} but the run has {spec.iterations} iterations: only its end "
            "is saved, and a crash starts over; lower it"
        )
    if spec.checkpoints.keep_best and spec.gate.judge is None and spec.checkpoints.keep_best > 1:
        yield (
            f"checkpoints.keep_best is {spec.checkpoints.keep_best} but there is no judge to say which are best; "
            "set gate.judge"
        )
