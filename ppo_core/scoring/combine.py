"""The reward of a run: its sources' weighted sum, with every unusable result found, counted and left out."""

from __future__ import annotations

import logging
import math
import numbers
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_core.errors import DataError, RewardError
from ppo_core.models.loading import named_field
from ppo_core.scoring.http_service import HttpService
from ppo_core.scoring.python_function import PythonFunction
from ppo_core.scoring.sequence_classifier import SequenceClassifier, reading_of
from ppo_core.scoring.source import RewardSource, Unusable, not_asked_to_end
from ppo_core.spec.scorers import JUDGE_FUNCTIONS, REWARD_FUNCTIONS, JudgeConfig, RewardConfig, Scorer

LOG = logging.getLogger(__name__)

# A judge is asked seldom, and of few answers.
JUDGE_TIMEOUT_S = 60.0
JUDGE_MAX_INVALID_SHARE = 0.1


@dataclass(frozen=True)
class Scores:
    """One batch of scores; B responses in order."""

    values: Tensor  #: [B] float64: the weighted sum, or the fallback; NaN where there is neither
    valid: Tensor  #: [B] bool, whether there is a value to train on
    scored: Tensor  #: [B] bool, whether every source gave a usable score; False with a fallback
    parts: tuple[Tensor, ...]  #: each source's own scores [B] float64 before its weight; NaN where unusable
    reasons: dict[str, int]  #: unusable responses by reason; a response counts once, by its first source that failed


@dataclass(frozen=True)
class Reward:
    """Sources with their weights, and what becomes of responses without a usable score."""

    sources: tuple[tuple[RewardSource, float], ...]
    max_invalid_share: float  #: above this share a batch is refused
    fallback: float | None = None  #: what such a response counts instead; None: it is left out

    @classmethod
    def of(cls, config: RewardConfig) -> Reward:
        """Load what a spec's reward group names.

        Raises:
            DataError: a model or function cannot be used.
        """
        sources = []
        for index, source in enumerate(config.sources):
            with named_field(f"reward.sources.{index}"):
                sources.append((load_source(source, REWARD_FUNCTIONS, config.timeout_s), source.weight))
        return cls(tuple(sources), config.max_invalid_share, config.fallback)

    def score(
        self, prompts: Sequence[str], responses: Sequence[str], check: Callable[[], None] = not_asked_to_end
    ) -> Scores:
        """Score every response to its prompt; what `check` raises, called while it waits, ends it.

        Raises:
            RewardError: more than `max_invalid_share` of the responses have no usable score.
        """
        num_rows = len(responses)
        values = torch.zeros(num_rows, dtype=torch.float64)
        faults: list[Unusable | None] = [None] * num_rows
        parts = []
        for source, weight in self.sources:
            cleaned = clean(source.score(prompts, responses, check), num_rows)
            part = torch.tensor(
                [math.nan if isinstance(each, Unusable) else each for each in cleaned], dtype=torch.float64
            )
            faults = [
                old or (each if isinstance(each, Unusable) else None) for old, each in zip(faults, cleaned, strict=True)
            ]
            values += weight * part
            parts.append(part)
        faults = [fault or _beyond_float32(value) for fault, value in zip(faults, values.tolist(), strict=True)]
        found = [fault for fault in faults if fault is not None]
        reasons: Counter[str] = Counter(fault.reason for fault in found)
        if found:
            LOG.warning("%d of %d scores are unusable: %s; first: %s", len(found), num_rows, dict(reasons), found[0])
        if len(found) > self.max_invalid_share * num_rows:
            counts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
            raise RewardError(
                f"{len(found)} of {num_rows} scores are unusable ({counts}), allowed are "
                f"{self.max_invalid_share:.0%}; the first: {found[0].detail or found[0].reason}"
            )
        scored = torch.tensor([fault is None for fault in faults], dtype=torch.bool)
        instead = math.nan if self.fallback is None else self.fallback
        valid = scored if self.fallback is None else torch.ones_like(scored)
        return Scores(torch.where(scored, values, instead), valid, scored, tuple(parts), {**reasons})

    def close(self) -> None:
        """End the sources' processes."""
        for source, _ in self.sources:
            source.close()


def load_judge(config: JudgeConfig, beside: Reward | None = None) -> Reward:
    """The judge, as a reward of one source of weight 1.

    Args:
        beside: the training reward.

    Raises:
        DataError: its model or function cannot be used, or it is a function of `beside` under another name.
    """
    with named_field("gate.judge"):
        source = load_source(config, JUDGE_FUNCTIONS, JUDGE_TIMEOUT_S)
    for index, (other, _) in enumerate(beside.sources if beside is not None else ()):
        if not (isinstance(source, PythonFunction) and isinstance(other, PythonFunction)):
            continue
        if source.content is not None and source.content == other.content:
            source.close()
            raise DataError(
                f"gate.judge.name {config.name!r} is the function of reward.sources.{index} under another name, so it "
                "cannot see that one being hacked",
                hint="Name a judge that shares nothing with the reward.",
            )
    return Reward(((source, 1.0),), JUDGE_MAX_INVALID_SHARE)


def load_source(scorer: Scorer, group: str, timeout_s: float) -> RewardSource:
    """One scorer by its kind; `group` is where a `python` one is registered."""
    match scorer:
        case Scorer(kind="sequence_classifier", model=str(model)):
            return SequenceClassifier(model, timeout_s, reading_of(scorer))
        case Scorer(kind="python", name=str(name)):
            return PythonFunction(group, name, timeout_s)
        case Scorer(kind="http", url=str(url)):
            return HttpService.of(url, scorer.batch_size, scorer.retries, timeout_s, os.environ)
    raise ValueError(f"{scorer!r} is no scorer")


def _beyond_float32(total: float) -> Unusable | None:
    """Training is in float32: a sum that is infinite there would spread from one response to all of them."""
    if abs(total) > torch.finfo(torch.float32).max:
        return Unusable("infinite", f"the weighted sum {total:g} is beyond float32's range")
    return None


def clean(results: Sequence[object], num_rows: int) -> list[float | Unusable]:
    """What a source said, row by row: a finite number, or why there is none.

    A result of the wrong number makes every row unusable: there is no telling which is whose.
    """
    try:
        count = len(results)
    except TypeError:
        return [Unusable("wrong_type", f"a {type(results).__name__} is no list of scores")] * num_rows
    if count != num_rows:
        return [Unusable("wrong_count", f"{count} scores for {num_rows} responses")] * num_rows
    return [_clean_one(result) for result in results]


def _clean_one(result: object) -> float | Unusable:
    if isinstance(result, Unusable):
        return result
    if result is None:
        return Unusable("missing", "None is no score")
    if isinstance(result, bool) or not isinstance(result, numbers.Real):
        return Unusable("wrong_type", f"a {type(result).__name__} is no score")
    try:
        score = float(result)
    except OverflowError:
        return Unusable("infinite", "the score is beyond the floating range")
    if math.isnan(score):
        return Unusable("nan", "the score is NaN")
    if math.isinf(score):
        return Unusable("infinite", f"the score is {score}")
    return score
