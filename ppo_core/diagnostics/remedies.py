"""What a roll back would change to mend what an alert is about: settings by dotted name, from the run's own spec.

Only fields that a roll back may change, with values that the spec allows. It knows no checkpoint but the number of the
iteration that it was made after.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ppo_core.spec import RunSpec

Changes = dict[str, Any]
MOST_KL_COEF = 100.0
MOST_ENTROPY_COEF = 10.0
MOST_NEW_TOKENS = 131_072
# Iterations in which only the critic learns, after going back.
WARM_UP = 10


def changes_for(story: str, spec: RunSpec, metrics: set[str], iteration: int, context: int | None = None) -> Changes:
    """Settings to go back with; none where no setting mends it.

    Args:
        story: name of the story, or the gate's rule.
        metrics: those of its evidence.
        iteration: of the checkpoint to go back to, 0 for the start.
        context: positions that the policy has; None: not known.
    """
    if story == "generation_cut_off":
        return _longer(spec, context)
    make = _CHANGES.get(story)
    return make(spec, metrics, iteration) if make is not None else {}


def _stronger_kl(spec: RunSpec) -> Changes:
    if spec.kl.target is not None:
        return {"kl.target": _digits(spec.kl.target / 2)}
    return {"kl.coef": min(MOST_KL_COEF, _digits(max(3 * spec.kl.coef, 0.05)))}


def _length(spec: RunSpec, metrics: set[str], iteration: int) -> Changes:
    changes = _stronger_kl(spec)
    changes["reward.missing_eos_penalty"] = max(-1000.0, min(2 * spec.reward.missing_eos_penalty, -1.0))
    if "reward/length_slope" in metrics and spec.reward.length_baseline == "none" and spec.rollout.batch_size >= 16:
        changes["reward.length_baseline"] = "linear"
    return changes


def _form(spec: RunSpec, metrics: set[str], iteration: int) -> Changes:
    changes = _stronger_kl(spec)
    if "policy/entropy" in metrics:
        changes |= _bonus(spec)
    return changes


def _bonus(spec: RunSpec) -> Changes:
    return {"update.entropy_coef": min(MOST_ENTROPY_COEF, _digits(max(2 * spec.update.entropy_coef, 0.01)))}


def _certain(spec: RunSpec, metrics: set[str], iteration: int) -> Changes:
    return {**_bonus(spec), **_stronger_kl(spec)}


def _slower(spec: RunSpec, metrics: set[str], iteration: int) -> Changes:
    changes = _stronger_kl(spec)
    if metrics & {"policy/approx_kl", "policy/clip_fraction"}:
        changes["update.learning_rate"] = _digits(spec.update.learning_rate / 2)
    return changes


def _fewer_epochs(spec: RunSpec, metrics: set[str], iteration: int) -> Changes:
    changes: Changes = {"update.epochs": max(1, min(2, spec.update.epochs // 2))}
    if spec.update.target_kl is None:
        changes["update.target_kl"] = 0.05
    return changes


def _teach(spec: RunSpec, metrics: set[str], iteration: int) -> Changes:
    rate = spec.update.value_learning_rate or spec.update.learning_rate
    changes: Changes = {"update.value_learning_rate": min(1.0, _digits(3 * rate))}
    if "value/clip_fraction" in metrics and spec.update.value_clip_range is not None:
        changes["update.value_clip_range"] = None
    if iteration + WARM_UP < spec.iterations:
        # It counts from the run's beginning, wherever a segment starts.
        changes["update.critic_warmup_iterations"] = iteration + WARM_UP
    return changes


def _longer(spec: RunSpec, context: int | None) -> Changes:
    """Answers twice as long, or as long as the policy's context has room for; nothing where that is no more."""
    room = MOST_NEW_TOKENS if context is None else min(MOST_NEW_TOKENS, context - spec.data.max_prompt_tokens)
    longer = min(2 * spec.rollout.max_new_tokens, room)
    return {"rollout.max_new_tokens": longer} if longer > spec.rollout.max_new_tokens else {}


def _digits(value: float) -> float:
    """Two digits are as many as a proposal can mean."""
    return float(f"{value:.2g}")


_CHANGES: dict[str, Callable[[RunSpec, set[str], int], Changes]] = {
    "length_hacking": _length,
    "reward_hacking": _form,
    "entropy_collapse": _certain,
    "kl_runaway": _slower,
    "too_many_epochs": _fewer_epochs,
    "critic_not_learning": _teach,
    "gate:judge": _form,
}
