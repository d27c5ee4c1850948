"""Answers to prompts that are never trained on, always with the same seeds, so that evaluations can be compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ppo_core.data.prompts import PromptSource
from ppo_core.errors import DataError
from ppo_core.evaluation.gate import GateState, Verdict, judge_verdict
from ppo_core.masked import masked_mean
from ppo_core.rollout.batch import response_text
from ppo_core.rollout.engine import FinishReason, RolloutEngine
from ppo_core.scoring.combine import Scores
from ppo_core.scoring.shared import BatchScorer
from ppo_core.scoring.source import not_asked_to_end
from ppo_core.seeds import derived_seed
from ppo_core.spec import RunSpec


@dataclass(frozen=True)
class Answers:
    """One evaluation: every list has an entry a prompt, in the file's order. None: no usable score."""

    prompts: list[str]
    responses: list[str]
    ids: list[list[int]]
    finish_reasons: list[FinishReason]
    scores: list[float | None]
    judge_scores: list[float | None] | None  #: None without a judge
    policy_version: int

    @property
    def judge_mean(self) -> float | None:
        """Mean score by the judge; None without a judge or without a usable score."""
        usable = [score for score in self.judge_scores or [] if score is not None]
        if not usable:
            return None
        values = torch.tensor(usable, dtype=torch.float64)
        return float(masked_mean(values, torch.ones_like(values, dtype=torch.bool)))


class HeldOut:
    """The held-out prompts of a run, with its reward and its judge.

    Answers as many of the file's first prompts as evaluation or gate ask for, whichever is more.

    Raises:
        DataError: the spec names no held-out file, or a row of it is unfit.
    """

    def __init__(self, spec: RunSpec, tokenizer: Any, reward: BatchScorer, judge: BatchScorer | None) -> None:
        if spec.data.held_out is None:
            raise DataError("data.held_out names no file, so there is nothing to evaluate on")
        num_prompts = max(spec.evaluation.prompts, spec.gate.prompts if judge is not None else 0)
        self.source = PromptSource(
            spec.data.held_out, tokenizer, spec.data.max_prompt_tokens, spec.seed, too_long=spec.data.too_long
        )
        self._prompts = self.source.first(num_prompts)
        self._seeds = [derived_seed(spec.seed, "held_out", row) for row in range(len(self._prompts.texts))]
        self._batch_size = spec.rollout.batch_size
        self._num_gate_prompts = spec.gate.prompts
        self._tokenizer, self._reward, self._judge = tokenizer, reward, judge

    def answer(self, engine: RolloutEngine, check: Callable[[], None] | None = None) -> Answers:
        """Generate and score the answers; what `check` raises, called all the while, ends it.

        Raises:
            RewardError: the reward or the judge gave too few usable scores.
        """
        responses = []
        for start in range(0, len(self._seeds), self._batch_size):
            rows = slice(start, start + self._batch_size)
            responses += engine.generate(self._prompts.prompt_ids[rows], seeds=self._seeds[rows], check=check)
        texts = [
            response_text(prompt, response.ids, self._decode)
            for prompt, response in zip(self._prompts.prompt_ids, responses, strict=True)
        ]
        asked = check or not_asked_to_end
        scores = self._reward.score(self._prompts.texts, texts, asked)
        judged = self._judge.score(self._prompts.texts, texts, asked) if self._judge is not None else None
        return Answers(
            prompts=self._prompts.texts,
            responses=texts,
            ids=[response.ids for response in responses],
            finish_reasons=[response.finish_reason for response in responses],
            scores=_usable(scores),
            judge_scores=None if judged is None else _usable(judged),
            policy_version=engine.version,
        )

    def start_gate(self, answers: Answers) -> GateState:
        """What every later gate is compared with; `answers` are the starting policy's."""
        return GateState.start(*self._gate_scores(answers))

    def judge_gate(self, state: GateState, answers: Answers) -> Verdict:
        """Compare these answers with those of the last gate and of the start."""
        return judge_verdict(state, *self._gate_scores(answers))

    def close(self) -> None:
        """End the judge's processes; the reward is the caller's."""
        if self._judge is not None:
            self._judge.close()

    def _gate_scores(self, answers: Answers) -> tuple[list[float | None], list[float | None]]:
        num = self._num_gate_prompts
        return answers.scores[:num], (answers.judge_scores or [])[:num]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def _usable(scores: Scores) -> list[float | None]:
    """What was measured: a fallback is something to train with, and no score of an answer."""
    return [
        value if scored else None for value, scored in zip(scores.values.tolist(), scores.scored.tolist(), strict=True)
    ]
