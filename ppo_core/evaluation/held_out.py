"""Answers to prompts that are never trained on, always with the same seeds, so that evaluations can be compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ppo_core.data.prompts import PromptSource
from ppo_core.errors import DataError
from ppo_core.evaluation.gate import Verdict, WinRate, judge_verdict, paired_rise, win_rate, win_rate_of
from ppo_core.evaluation.gate_state import GateState, KeptAnswers
from ppo_core.masked import masked_mean
from ppo_core.rollout.batch import response_text
from ppo_core.rollout.engine import FinishReason, RolloutEngine
from ppo_core.scoring.combine import Scores
from ppo_core.scoring.pair_judge import Comparison, PairJudge, Pairs
from ppo_core.scoring.shared import BatchScorer
from ppo_core.scoring.source import not_asked_to_end
from ppo_core.seeds import derived_seed
from ppo_core.spec import RunSpec

Check = Callable[[], None]


@dataclass(frozen=True)
class Answers:
    """One evaluation: every list has an entry a prompt, in the file's order. None: no usable score."""

    prompts: list[str]
    responses: list[str]
    ids: list[list[int]]
    finish_reasons: list[FinishReason]
    scores: list[float | None]
    judge_scores: list[float | None] | None  #: None without a judge that scores
    policy_version: int

    @property
    def judge_mean(self) -> float | None:
        """Mean score by the judge; None without one that scores or without a usable score."""
        usable = [score for score in self.judge_scores or [] if score is not None]
        if not usable:
            return None
        values = torch.tensor(usable, dtype=torch.float64)
        return float(masked_mean(values, torch.ones_like(values, dtype=torch.bool)))


@dataclass(frozen=True)
class HeldGate:
    """A verdict, what the next gate needs, and how a judge that compares could be asked; None: it scores."""

    verdict: Verdict
    state: GateState
    asked: tuple[Comparison, Comparison] | None  #: about the last gate's answers and about the start's

    def as_dict(self) -> dict[str, Any]:
        """What the journal tells of it."""
        told = self.verdict.as_dict()
        for name, asked in zip(("against_last", "against_start"), self.asked or (), strict=False):
            told[name] |= {"asked": asked.num_asked, "swayed": asked.num_swayed, "unreadable": asked.num_unreadable}
        return told


class HeldOut:
    """The held-out prompts of a run, with its reward and its judge.

    Answers as many of the file's first prompts as evaluation or gate ask for, whichever is more.

    Args:
        judge: one that scores each answer.
        pair_judge: one that compares answers instead.

    Raises:
        DataError: the spec names no held-out file, or a row of it is unfit.
    """

    def __init__(
        self,
        spec: RunSpec,
        tokenizer: Any,
        reward: BatchScorer,
        judge: BatchScorer | None,
        pair_judge: PairJudge | None = None,
    ) -> None:
        if spec.data.held_out is None:
            raise DataError("data.held_out names no file, so there is nothing to evaluate on")
        self.judge, self.pair_judge = judge, pair_judge
        num_prompts = max(spec.evaluation.prompts, spec.gate.prompts if self.has_judge else 0)
        self.source = PromptSource(
            spec.data.held_out, tokenizer, spec.data.max_prompt_tokens, spec.seed, too_long=spec.data.too_long
        )
        self._prompts = self.source.first(num_prompts)
        self._seeds = [derived_seed(spec.seed, "held_out", row) for row in range(len(self._prompts.texts))]
        self._batch_size = spec.rollout.batch_size
        self._num_gate_prompts = spec.gate.prompts
        self._tokenizer, self._reward = tokenizer, reward

    @property
    def has_judge(self) -> bool:
        """Whether gates can be held."""
        return self.judge is not None or self.pair_judge is not None

    @property
    def gate_prompts(self) -> list[str]:
        """The prompts of a gate, the same each time: no more than the file has."""
        return self._prompts.texts[: self._num_gate_prompts]

    def answer(self, engine: RolloutEngine, check: Check | None = None) -> Answers:
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
        judged = self.judge.score(self._prompts.texts, texts, asked) if self.judge is not None else None
        return Answers(
            prompts=self._prompts.texts,
            responses=texts,
            ids=[response.ids for response in responses],
            finish_reasons=[response.finish_reason for response in responses],
            scores=usable(scores),
            judge_scores=None if judged is None else usable(judged),
            policy_version=engine.version,
        )

    def start_gate(self, answers: Answers) -> GateState:
        """What every later gate is compared with; `answers` are the starting policy's."""
        kept = self._kept(answers)
        return GateState(self.gate_prompts, kept, kept, 0)

    def hold_gate(self, state: GateState, answers: Answers, check: Check = not_asked_to_end) -> HeldGate:
        """Compare these answers with those of the last gate and of the start.

        What `check` raises, called while the judge is waited for, ends it, and nothing has happened.

        Raises:
            RewardError: the reward or the judge gave too few usable scores or verdicts.
        """
        state = self._with_all_scores(state, check)
        now, asked = self._kept(answers), None
        against_last, against_start = self._by_scores(now, state.last), self._by_scores(now, state.start)
        if self.pair_judge is not None:
            last = self._compared(now, state.last, check)
            # The first gate's last one is the start.
            start = last if state.start == state.last else self._compared(now, state.start, check)
            asked = last, start
            against_last, against_start = win_rate_of(last.preferences), win_rate_of(start.preferences)
        rise = paired_rise(now.scores or [], state.last.scores or [])
        verdict = judge_verdict(rise, against_last, against_start, state.num_suspect)
        return HeldGate(verdict, GateState(self.gate_prompts, state.start, now, verdict.num_suspect), asked)

    def close(self) -> None:
        """End the judge's processes; the reward is the caller's."""
        for judge in (self.judge, self.pair_judge):
            if judge is not None:
                judge.close()

    def _kept(self, answers: Answers) -> KeptAnswers:
        num, judged = self._num_gate_prompts, answers.judge_scores
        return KeptAnswers(answers.responses[:num], answers.scores[:num], None if judged is None else judged[:num])

    def _with_all_scores(self, state: GateState, check: Check) -> GateState:
        """A roll back may have brought another reward or judge, which has not seen these answers yet."""
        start = self._with_scores(state.prompts, state.start, check)
        last = start if state.last == state.start else self._with_scores(state.prompts, state.last, check)
        return replace(state, start=start, last=last)

    def _with_scores(self, prompts: list[str], kept: KeptAnswers, check: Check) -> KeptAnswers:
        if kept.scores is None:
            kept = replace(
                kept, scores=usable(self._reward.score(prompts[: len(kept.responses)], kept.responses, check))
            )
        if kept.judged is None and self.judge is not None:
            kept = replace(kept, judged=usable(self.judge.score(prompts[: len(kept.responses)], kept.responses, check)))
        return kept

    def _by_scores(self, now: KeptAnswers, then: KeptAnswers) -> WinRate:
        return win_rate(now.judged or [], then.judged or [])

    def _compared(self, now: KeptAnswers, then: KeptAnswers, check: Check) -> Comparison:
        """As far as both go: a roll back may have changed the number of prompts."""
        assert self.pair_judge is not None  # The caller has seen it.
        num = min(len(now.responses), len(then.responses))
        pairs = Pairs(self.gate_prompts[:num], now.responses[:num], then.responses[:num])
        return self.pair_judge.compare(pairs, check)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def usable(scores: Scores) -> list[float | None]:
    """What was measured: a fallback is something to train with, and no score of an answer."""
    return [
        value if scored else None for value, scored in zip(scores.values.tolist(), scores.scored.tolist(), strict=True)
    ]
