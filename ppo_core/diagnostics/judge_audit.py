"""The judge looked at before anything is spent on it: does it order answers otherwise than the reward does?

What the spec names tells only some twins apart: a copied model or a function's second name. A judge that orders every
answer as the reward does is one in effect, whatever it is made of: it will see a gain wherever the reward pays one.
"""

from __future__ import annotations

from collections.abc import Mapping

from ppo_core.diagnostics.finding import Finding
from ppo_core.diagnostics.reward_audit import LEAST_PAIRS, Scores, correlation

MOST_AGREEMENT = 0.98
_REMEDY = "Name a judge that shares nothing with the reward: other data, another model, or a rule of its own."


def against_reward(judged: Scores, rewards: Mapping[str, Scores]) -> Finding:
    """Whether the judge's order of answers is that of the reward, or of one of its sources.

    Args:
        judged: the judge's score of each answer.
        rewards: scores of the same answers, by the name of what gave them.
    """
    num = sum(score is not None for score in judged)
    agreement = {name: found for name, scores in rewards.items() if (found := _agreement(judged, scores)) is not None}
    if not agreement:
        return Finding("judge", "ok", f"{num} answers were scored, which do not differ enough to tell more")
    name = max(agreement, key=lambda each: agreement[each])
    detail = f"the judge's order of {num} answers and that of {name} have a correlation of {agreement[name]:.3f}"
    if agreement[name] > 1 - 1e-9:
        return Finding("judge", "failed", f"{detail}: they are one in effect, and the gate sees nothing", _REMEDY)
    if agreement[name] > MOST_AGREEMENT:
        return Finding("judge", "warning", f"{detail}: what fools the one will fool the other", _REMEDY)
    return Finding("judge", "ok", detail)


def _agreement(judged: Scores, scores: Scores) -> float | None:
    """Spearman's correlation; None where fewer than LEAST_PAIRS values differ on a side, which chance orders alike."""
    pairs = [(one, other) for one, other in zip(judged, scores, strict=True) if one is not None and other is not None]
    ours, theirs = [one for one, _ in pairs], [other for _, other in pairs]
    if min(len(set(ours)), len(set(theirs))) < LEAST_PAIRS:
        return None
    return correlation(ranks(ours), ranks(theirs))


def ranks(values: list[float]) -> list[float]:
    """The place of each value in their order, from 0; equal ones share the middle of their places.

    Example: 5 1 5 9 are at 1.5 0 1.5 3.
    """
    ordered = sorted(values)
    below = {value: ordered.index(value) for value in set(values)}
    return [below[value] + (ordered.count(value) - 1) / 2 for value in values]
