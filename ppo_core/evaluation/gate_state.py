"""What a gate needs of the past: the answers that the next ones are compared with, kept in checkpoints as plain data.

The texts are kept, not only what was made of them, so that another judge or another reward, taken up by a roll back,
judges the same answers anew instead of being compared with numbers that are not its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ppo_core.score_shaping import same_scores
from ppo_core.spec import RunSpec
from ppo_core.spec.groups import GateConfig
from ppo_core.spec.scorers import JudgeConfig


@dataclass(frozen=True)
class KeptAnswers:
    """Answers of an earlier policy, by held-out prompt. None in a list's place: it has to be made anew."""

    responses: list[str]
    scores: list[float | None] | None  #: the training reward's
    judged: list[float | None] | None  #: the judge's, if it scores

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> KeptAnswers:
        return cls(**document)


@dataclass(frozen=True)
class GateState:
    """The start's and the last gate's answers, and what the verdicts so far come to."""

    prompts: list[str]
    start: KeptAnswers
    last: KeptAnswers
    num_suspect: int  #: gates in a row whose training score rose while the win rate was at most one half

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> GateState:
        """
        Raises:
            TypeError, KeyError: it was written by a version that kept something else.
        """
        start, last = KeptAnswers.of(document["start"]), KeptAnswers.of(document["last"])
        return cls(list(document["prompts"]), start, last, int(document["num_suspect"]))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def gate_to_start_from(
    kept: dict[str, Any] | None, kept_spec: Mapping[str, Any], spec: RunSpec, prompts: list[str]
) -> dict[str, Any] | None:
    """The gate's state of a run that goes on from a checkpoint; None where it has to begin anew.

    Args:
        kept: the checkpoint's.
        kept_spec: the spec that the checkpoint was written under, as it was stored.
        spec: the spec that goes on.
        prompts: its held-out prompts.
    """
    if kept is None:
        return None
    try:
        state = GateState.of(kept)
    except (TypeError, KeyError):
        return None
    num = min(len(state.prompts), len(prompts))
    if not num or state.prompts[:num] != prompts[:num]:
        return None  # A fork with other held-out prompts: these answers are to none of them.
    changed = False
    if not same_scores(kept_spec, spec.reward):
        state, changed = _with_each(state, lambda kept: replace(kept, scores=None)), True
    if _judge_of(kept_spec) != (spec.gate.judge and _way_of_judging(spec.gate.judge)):
        state, changed = _with_each(state, lambda kept: replace(kept, judged=None)), True
    return (replace(state, num_suspect=0) if changed else state).as_dict()


def _with_each(state: GateState, change: Callable[[KeptAnswers], KeptAnswers]) -> GateState:
    return replace(state, start=change(state.start), last=change(state.last))


def _judge_of(kept_spec: Mapping[str, Any]) -> object:
    try:
        judge = GateConfig.model_validate(kept_spec["gate"]).judge
    except (ValueError, KeyError):  # Stored by a version with other fields: nothing says how it judged.
        return "unknown"
    return judge and _way_of_judging(judge)


def _way_of_judging(judge: JudgeConfig) -> tuple[object, ...]:
    """What makes its verdicts what they are; how patiently a service is asked does not."""
    return judge.identity, judge.template, judge.chat_template, judge.served_model, judge.question
