"""From the reward sources' score to the one that is trained on: length baseline, normalisation, penalty, limit.

The order is fixed, and each step has its reason to stand where it does:

1. *Length baseline*, in the sources' own unit: it takes out what the sources pay for length, nothing else. After the
   penalty it would also take out part of that, for cut-off responses are the longest ones.
2. *Normalisation* of what is left, so that mean and deviation are those of the scorer and not of the penalty.
3. *Missing-EOS penalty*. After the normalisation, where it keeps its size: with `reward.normalize` it counts in
   standard deviations of the score, so the same number suits any reward model, and a batch in which all responses are
   cut off is punished instead of being the new zero.
4. *Limit*, last, because it bounds what one response can do to an update, the penalty included. This is why the
   penalty is added here and not by `per_token_rewards`, which can do so itself.

Every stage is kept and logged. The module knows neither how a score was made nor what becomes of it per token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ppo_core.errors import ShapeError
from ppo_core.masked import masked_mean, masked_slope, masked_var
from ppo_core.spec.scorers import MIN_ROWS_FOR_SLOPE, RewardConfig

# Added to the variance inside the root, as in `masked_whiten`: equal scores become 0, and rounding is not blown up.
EPS = 1e-8


@dataclass(frozen=True)
class RunningMoments:
    """Count, mean and summed squared deviation of every score so far; plain numbers, kept in checkpoints."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  #: sum of (score - mean)^2

    @classmethod
    def of(cls, kept: dict[str, Any] | None) -> RunningMoments:
        return cls() if kept is None else cls(**kept)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def deviation(self) -> float:
        """Standard deviation (biased); 0 for one score and for none."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    def merged_with(self, x: Tensor) -> RunningMoments:
        """These and the values of x [B], any B, as one; in float64 whatever x is.

        Source: Chan, Golub, LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
        """
        num, every = x.numel(), torch.ones_like(x, dtype=torch.bool)
        if num == 0:
            return self
        wide, count = x.double(), self.count + num
        distance = float(masked_mean(wide, every)) - self.mean
        between = distance**2 * self.count * num / count
        return RunningMoments(
            count, self.mean + distance * (num / count), self.squares + float(masked_var(wide, every)) * num + between
        )

    def standardized(self, x: Tensor) -> Tensor:
        """(x - mean) / sqrt(variance + 1e-8), x's shape and dtype; scores that never varied become 0."""
        return ((x.double() - self.mean) / math.sqrt(self.deviation**2 + EPS)).to(x.dtype)


@dataclass(frozen=True)
class ShapedScores:
    """One iteration's scores [B] at every stage, and what the next iteration needs of them."""

    raw: Tensor  #: the weighted sum of the sources
    corrected: Tensor  #: after the length baseline
    normalized: Tensor  #: after normalisation
    penalized: Tensor  #: after the missing-EOS penalty
    trained: Tensor  #: after the limit: what `per_token_rewards` is given
    length_slope: float | None  #: of raw over response length, score a token; None where no line can be told
    moments: RunningMoments  #: of the corrected scores, these included


def shape_scores(
    scores: Tensor, lengths: Tensor, truncated: Tensor, moments: RunningMoments, reward: RewardConfig
) -> ShapedScores:
    """All stages of one iteration's scores; a stage that is off passes on what it is given.

    The running moments hold this iteration's scores before these are normalised with them. So the first iteration is
    normalised with its own, and one single score, or equal scores, with nothing: they become 0. Moments are kept
    whether `reward.normalize` is on or not, so that a roll back that switches it on has them.

    Args:
        scores: [B] float32 or float64, of the usable responses; the dtype is kept.
        lengths: [B] int64, tokens of each response.
        truncated: [B] bool, True where the response was cut off.
        moments: of the corrected scores of all iterations before.
        reward: the spec's.

    Raises:
        ShapeError: the three tensors differ in shape.
    """
    for name, tensor in (("lengths", lengths), ("truncated", truncated)):
        if tensor.shape != scores.shape:
            raise ShapeError(f"{name} has shape {list(tensor.shape)}, scores {list(scores.shape)}")
    slope = length_slope(scores, lengths)
    corrected = without_length(scores, lengths, slope) if reward.length_baseline == "linear" else scores
    moments = moments.merged_with(corrected)
    normalized = moments.standardized(corrected) if reward.normalize else corrected
    penalized = torch.where(truncated, normalized + reward.missing_eos_penalty, normalized)
    trained = penalized if reward.clip is None else penalized.clamp(-reward.clip, reward.clip)
    return ShapedScores(scores, corrected, normalized, penalized, trained, slope, moments)


def length_slope(scores: Tensor, lengths: Tensor) -> float | None:
    """What one more token goes with, in score: the slope of the least-squares line of scores [B] over lengths [B].

    None where lengths are equal, and for fewer than three responses: a line through two points takes their whole
    difference for length.

    Example: scores 1 1 4 of lengths 1 2 3 give 1.5.
    """
    if scores.numel() < MIN_ROWS_FOR_SLOPE:
        return None
    return masked_slope(lengths.double(), scores.double(), torch.ones_like(scores, dtype=torch.bool))


def without_length(scores: Tensor, lengths: Tensor, slope: float | None) -> Tensor:
    """score - slope * (length - mean length), [B] in the dtype of scores: the mean stays, the correlation goes.

    Without a slope scores stay as they are.
    """
    if slope is None:
        return scores
    wide = lengths.double()
    distance = wide - masked_mean(wide, torch.ones_like(wide, dtype=torch.bool))
    return (scores.double() - slope * distance).to(scores.dtype)


def moments_to_start_from(
    kept: dict[str, Any] | None, kept_spec: Mapping[str, Any], reward: RewardConfig
) -> dict[str, Any] | None:
    """The running moments of a run that goes on from a checkpoint; None where they have to begin anew.

    Moments of other sources, or of scores that were corrected for length otherwise, are of another quantity.

    Args:
        kept: the checkpoint's.
        kept_spec: the spec that the checkpoint was written under, as it was stored.
        reward: the reward group of the spec that goes on.
    """
    then = _reward_of(kept_spec)
    return kept if then is not None and _quantity(then) == _quantity(reward) else None


def same_scores(kept_spec: Mapping[str, Any], reward: RewardConfig) -> bool:
    """Whether the raw scores made under `kept_spec` are of the same quantity as those that `reward` gives."""
    then = _reward_of(kept_spec)
    return then is not None and _sources(then) == _sources(reward)


def _reward_of(kept_spec: Mapping[str, Any]) -> RewardConfig | None:
    try:
        return RewardConfig.model_validate(kept_spec["reward"])
    except ValueError:  # Stored by a version with other fields: nothing says that the scores were made alike.
        return None


def _quantity(reward: RewardConfig) -> tuple[object, ...]:
    """What makes the corrected score the number that it is."""
    return reward.length_baseline, *_sources(reward)


def _sources(reward: RewardConfig) -> list[tuple[object, ...]]:
    """What makes the raw score the number that it is; how a service is asked does not."""
    return [(each.identity, each.weight, each.template, each.chat_template) for each in reward.sources]
