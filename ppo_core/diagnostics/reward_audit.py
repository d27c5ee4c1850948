"""The reward looked at before anything is spent on it: does it see more than length, and does it tell answers apart?

Pure functions of scores and lengths. A score of None could not be used, and is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, pstdev

from ppo_core.diagnostics.finding import Finding

Scores = Sequence[float | None]

MOST_CORRELATION = 0.5
MOST_WON_BY_LENGTH = 0.8
LEAST_PAIRS = 8
LEAST_WITHIN = 0.1
_NEUTRAL = "Set reward.length_baseline to linear, correct the reward source for length, or raise kl.coef."


def correlation(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Pearson's; None where one side does not vary.

    Example: 1 2 3 against 2 4 6 is 1.
    """
    if len(xs) < 2:
        return None
    x_mean, y_mean = fmean(xs), fmean(ys)
    spread = math.sqrt(sum((x - x_mean) ** 2 for x in xs) * sum((y - y_mean) ** 2 for y in ys))
    return sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / spread if spread else None


def against_length(scores: Scores, lengths: Sequence[int]) -> Finding:
    """Whether the score goes with the number of tokens."""
    pairs = [(float(length), score) for score, length in zip(scores, lengths, strict=True) if score is not None]
    found = correlation([length for length, _ in pairs], [score for _, score in pairs])
    if found is None or len(pairs) < LEAST_PAIRS:
        return Finding("reward_length", "ok", f"{len(pairs)} answers, which do not differ enough to tell")
    detail = f"score and length of {len(pairs)} answers have a correlation of {found:.2f}"
    if found > MOST_CORRELATION:
        return Finding("reward_length", "warning", f"{detail}: longer answers earn more", _NEUTRAL)
    return Finding("reward_length", "ok", detail)


def against_beginnings(scores: Scores, of_beginnings: Scores) -> Finding:
    """Whether an answer wins over its own first half, which says less and nothing else."""
    pairs = [(a, b) for a, b in zip(scores, of_beginnings, strict=True) if a is not None and b is not None and a != b]
    if len(pairs) < LEAST_PAIRS:
        return Finding("reward_prefix", "ok", f"{len(pairs)} answers differ from their first half, too few to tell")
    won = sum(a > b for a, b in pairs) / len(pairs)
    detail = f"{won:.0%} of {len(pairs)} answers score above their own first half"
    if won > MOST_WON_BY_LENGTH:
        return Finding("reward_prefix", "warning", f"{detail}: going on is what earns", _NEUTRAL)
    return Finding("reward_prefix", "ok", detail)


def spread(scores: Scores, prompts: Sequence[int]) -> Finding:
    """Whether answers to one prompt score differently, which is all that there is to learn from."""
    usable = [(prompt, score) for prompt, score in zip(prompts, scores, strict=True) if score is not None]
    if len(usable) < 2:
        return Finding("reward_spread", "failed", f"{len(usable)} usable scores", "Run the reward source by hand.")
    whole = pstdev(score for _, score in usable)
    if whole == 0:
        detail = f"all {len(usable)} answers score {usable[0][1]:.3g}"
        return Finding("reward_spread", "failed", detail, "Check that the reward source tells answers apart.")
    groups = [[s for p, s in usable if p == prompt] for prompt in {p for p, _ in usable}]
    several = [group for group in groups if len(group) > 1]
    if not several:
        return Finding("reward_spread", "ok", f"scores of {len(usable)} answers have a deviation of {whole:.3g}")
    within = math.sqrt(fmean(pstdev(group) ** 2 for group in several))
    detail = f"scores have a deviation of {whole:.3g}, and of {within:.3g} among the answers to one prompt"
    if within < LEAST_WITHIN * whole:
        remedy = "Check that the reward source reads the response, and not the prompt alone."
        return Finding("reward_spread", "warning", detail, remedy)
    return Finding("reward_spread", "ok", detail)
