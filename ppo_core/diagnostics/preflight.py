"""Checks before the first iteration: what would go wrong later, and can be seen now.

Alignment and averages are checked without the helpers that training uses: a row alone and unpadded through the plain
model, and sums in plain Python. Nothing here changes the run: weights, cursor and random draws stay as they are.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ppo_core import masked
from ppo_core.checkpoints import SavedTensors, TrainerState, write_checkpoint
from ppo_core.data.prompts import PromptBatch, PromptSource
from ppo_core.diagnostics.finding import Finding, Status
from ppo_core.diagnostics.judge_audit import against_reward
from ppo_core.diagnostics.reward_audit import against_beginnings, against_length, spread
from ppo_core.errors import PPOCoreError
from ppo_core.estimate import estimate
from ppo_core.evaluation.held_out import HeldOut, usable
from ppo_core.iteration import Models
from ppo_core.rollout.batch import Rollout, assemble, response_text
from ppo_core.rundir import SegmentDir, verify_checkpoint
from ppo_core.scoring.pair_judge import PairJudge, Pairs
from ppo_core.seeds import derived_seed
from ppo_core.spec import RunSpec
from ppo_core.training.passes import forward_policy

DRY_RUN = 32  # prompts
# Answers to each prompt of the audit: with one alone its spread could not be told.
ANSWERS_A_PROMPT = 4
ROWS_ALONE = 3
# Pairs that a judge by comparison is tried on, and the share of them it may decide by their place.
TRIAL_PAIRS = 16
MAX_SWAYED_SHARE = 0.5
# Nats. A neighbour's logprob or a wrong position is off by far more, two routes through one model by far less.
ALIGNED = {"float32": 1e-3, "bfloat16": 0.25}
GAP_WARNING, GAP_FAILED = 0.05, 0.3  # nats a token
_ALIGN = "Compare which logits are read for which token, position ids and padding; do not train before it is found."


class Preflight:
    """The checks of one run, made by all its ranks together."""

    def __init__(
        self,
        segment: SegmentDir,
        spec: RunSpec,
        models: Models,
        prompts: PromptSource,
        tokenizer: Any,
        check: Callable[[], None],
        held_out: HeldOut | None,
    ) -> None:
        self._held_out = held_out
        self._segment, self._spec, self._models = segment, spec, models
        self._prompts, self._tokenizer, self._check = prompts, tokenizer, check

    def findings(self) -> list[Finding]:
        """Every check, in order; one that cannot be made for a fault is told as failed.

        Raises:
            Interrupted: a stop or pause was asked.
        """
        rollout = self._answers(min(DRY_RUN, len(self._prompts)), 1, "preflight")
        steps: list[tuple[str, Callable[[], list[Finding]]]] = [
            ("checkpoint", self._checkpoint),
            ("alignment", lambda: self._alignment(rollout)),
            ("reward", lambda: self._reward(rollout)),
            ("audit", self._audit),
            ("judge", lambda: self._judge(rollout)),
            ("gate_prompts", self._gate_prompts),
            ("end_of_text", lambda: self._ends(rollout)),
            ("prompts", self._too_long),
            ("room", self._room),
        ]
        found: list[Finding] = []
        for name, step in steps:
            try:
                found += step()
            except PPOCoreError as fault:
                found.append(Finding(name, "failed", str(fault), fault.hint))
        return found

    def _answers(self, num_prompts: int, each: int, purpose: str) -> Rollout:
        """Answers to the file's first prompts, so many to each, in batches of the spec's size."""
        first = self._prompts.first(num_prompts)
        rows = [row for row in range(len(first.texts)) for _ in range(each)]
        seeds = [derived_seed(self._spec.data_seed, purpose, place) for place in range(len(rows))]
        responses = []
        for start in range(0, len(rows), self._spec.rollout.batch_size):
            some = slice(start, start + self._spec.rollout.batch_size)
            ids = [first.prompt_ids[row] for row in rows[some]]
            responses += self._models.engine.generate(ids, seeds=seeds[some], check=self._check)
        batch = PromptBatch(
            [first.prompt_ids[row] for row in rows],
            [first.texts[row] for row in rows],
            [first.indices[row] for row in rows],
        )
        return assemble(batch, responses, self._models.pad_id, self._models.decode, self._models.engine.version)

    # Saving

    def _checkpoint(self) -> list[Finding]:
        """Save the start as a checkpoint would, verify it, and read every tensor back."""
        ranks, trainer = self._models.ranks, self._models.trainer
        folder = self._segment.path / ".preflight"
        target = folder / "iter-000000"
        ranks.first(lambda: folder.mkdir(exist_ok=True))
        try:
            state = TrainerState(kl_coef=self._spec.kl.coef)
            write_checkpoint(target, trainer, self._tokenizer, state, self._spec, ranks)
            num = ranks.first(lambda: self._read_back(target))
        finally:
            ranks.first(lambda: shutil.rmtree(folder, ignore_errors=True))
        return [Finding("checkpoint", "ok", f"written, verified by its hashes, and {num} tensors read back")]

    def _read_back(self, target: Path) -> int:
        verify_checkpoint(target)
        index = json.loads((target / "state" / "index.json").read_text(encoding="utf-8"))["tensors"]
        saved = SavedTensors(target / "state", index)
        for name, part in self._models.trainer.export_state().items() if self._models.ranks.size == 1 else ():
            if not torch.equal(saved[name].flatten(), part.values.detach().cpu().flatten()):
                raise PPOCoreError(f"{name} reads otherwise than it was written", hint="See to the disk.")
        return sum(1 for name in saved if saved[name] is not None)

    # The numbers

    @torch.no_grad()
    def _alignment(self, rollout: Rollout) -> list[Finding]:
        spec, models = self._spec, self._models
        old = forward_policy(models.trainer, rollout, spec, self._check, models.ranks)
        found = [self._averages(old.logprobs, rollout)]
        gap = (rollout.engine_logprobs - old.logprobs).abs()[rollout.response_mask].tolist()
        mean = sum(gap) / len(gap) if gap else 0.0
        detail = f"engine and trainer differ by {mean:.2g} nats a token, {max(gap, default=0.0):.2g} at most"
        status: Status = "failed" if mean > GAP_FAILED else "warning" if mean > GAP_WARNING else "ok"
        remedy = "" if status == "ok" else "Compare precision, kernels, sampling settings and weights of the two."
        found.append(Finding("engine_parity", status, detail, remedy))
        if rollout.token_sets is not None or spec.training.zero_stage == 3:
            why = "sampling is limited" if rollout.token_sets is not None else "no rank holds the whole model"
            return [Finding("alignment", "ok", f"not compared with a row alone, since {why}"), *found]
        worst, row_of = 0.0, 0
        for row in range(min(ROWS_ALONE, rollout.num_rows)):
            expected = self._row_alone(rollout, row)
            own = old.logprobs[row][rollout.response_mask[row]].tolist()
            apart = max((abs(a - b) for a, b in zip(own, expected, strict=True)), default=0.0)
            worst, row_of = max((worst, row_of), (apart, row))
        detail = f"rows alone and unpadded agree with the batch within {worst:.2g} nats"
        if worst > ALIGNED[spec.policy.dtype]:
            detail = f"row {row_of} alone and unpadded has other logprobs than in the batch, by {worst:.3g} nats"
            return [Finding("alignment", "failed", detail, _ALIGN), *found]
        return [Finding("alignment", "ok", detail), *found]

    def _row_alone(self, rollout: Rollout, row: int) -> list[float]:
        """Logprobs of a row's response, by the plain model and by hand: the logits before a token are about it."""
        response = rollout.response_ids(row)
        start = int(rollout.response_start[row])
        real = rollout.attention_mask[row].bool()
        ids = rollout.input_ids[row][real].tolist()
        begins = int(real[:start].sum())
        policy = self._models.trainer.policy
        logits = policy.model(torch.tensor([ids], device=policy.device)).logits[0].double()
        scaled = logits / self._spec.rollout.temperature
        return [
            float(scaled[begins + place - 1, token] - scaled[begins + place - 1].logsumexp(0))
            for place, token in enumerate(response)
        ]

    def _averages(self, logprobs: torch.Tensor, rollout: Rollout) -> Finding:
        """The average that training takes, against a sum over the generated tokens by their recorded number."""
        taken = float(masked.masked_mean(logprobs, rollout.response_mask))
        total, count = 0.0, 0
        for row in range(rollout.num_rows):
            first, length = int(rollout.response_start[row]) - 1, int(rollout.response_length[row])
            total += sum(logprobs[row, first : first + length].tolist())
            count += length
        by_hand = total / count if count else 0.0
        if abs(taken - by_hand) > 1e-4 * max(1.0, abs(by_hand)):
            detail = f"the mean logprob is {taken:.4g} by the mask and {by_hand:.4g} by the recorded lengths"
            remedy = "Averages count other tokens than the response's: look at the mask; do not train before."
            return Finding("averages", "failed", detail, remedy)
        return Finding("averages", "ok", f"averages are over the {count} generated tokens alone")

    # The reward

    def _reward(self, rollout: Rollout) -> list[Finding]:
        scores = self._models.reward.score(rollout.prompt_texts, rollout.response_texts)
        num = int(scores.scored.count_nonzero())
        if num < rollout.num_rows:
            why = ", ".join(f"{count} {reason}" for reason, count in scores.reasons.items())
            detail = f"{rollout.num_rows - num} of {rollout.num_rows} scores are unusable: {why}"
            return [Finding("reward", "warning", detail, "Run the reward source on these answers by hand.")]
        return [Finding("reward", "ok", f"{num} answers to as many prompts were scored")]

    def _audit(self) -> list[Finding]:
        num = self._spec.preflight.audit_answers
        if num == 0:
            return []
        num_prompts = max(1, min(num // ANSWERS_A_PROMPT, len(self._prompts)))
        rollout = self._answers(num_prompts, min(num, ANSWERS_A_PROMPT), "audit")
        ids = [rollout.response_ids(row) for row in range(rollout.num_rows)]
        starts = [int(start) for start in rollout.response_start]
        prompts = [rollout.input_ids[row, :start].tolist() for row, start in enumerate(starts)]
        halves = [
            response_text(prompt, own[: max(1, len(own) // 2)], self._models.decode)
            for prompt, own in zip(prompts, ids, strict=True)
        ]
        scores, of_halves = (self._scores(rollout, texts) for texts in (list(rollout.response_texts), halves))
        return [
            against_length(scores, [len(own) for own in ids]),
            against_beginnings(scores, of_halves),
            spread(scores, rollout.prompt_indices),
        ]

    def _scores(self, rollout: Rollout, texts: list[str]) -> list[float | None]:
        return usable(self._models.reward.score(rollout.prompt_texts, texts))

    # The judge

    def _judge(self, rollout: Rollout) -> list[Finding]:
        held_out = self._held_out
        if held_out is None or not held_out.has_judge:
            return []
        if held_out.pair_judge is not None:
            return [self._comparing(held_out.pair_judge, rollout)]
        assert held_out.judge is not None  # One of the two there is.
        scores = self._models.reward.score(rollout.prompt_texts, rollout.response_texts, self._check)
        judged = held_out.judge.score(rollout.prompt_texts, rollout.response_texts, self._check)
        parts = {f"reward.sources.{index}": part.tolist() for index, part in enumerate(scores.parts)}
        return [against_reward(usable(judged), {"the reward": usable(scores), **parts})]

    def _gate_prompts(self) -> list[Finding]:
        held_out, wanted = self._held_out, self._spec.gate.prompts
        if held_out is None or not held_out.has_judge:
            return []
        num = len(held_out.gate_prompts)
        if num < wanted:
            detail = f"the held-out file has {num} prompts that fit, and gate.prompts asks for {wanted}"
            return [Finding("gate_prompts", "warning", detail, "Add held-out prompts: fewer tell less.")]
        return [Finding("gate_prompts", "ok", f"a gate compares answers to {num} held-out prompts")]

    def _comparing(self, judge: PairJudge, rollout: Rollout) -> Finding:
        """Each answer against the next prompt's: whoever reads the prompt can tell them apart."""
        texts = list(rollout.response_texts[: TRIAL_PAIRS + 1])
        said = judge.compare(Pairs(rollout.prompt_texts[: len(texts) - 1], texts[:-1], texts[1:]), self._check)
        detail = (
            f"the judge compared {said.num_asked} pairs of answers in both orders; {said.num_swayed} times it "
            "preferred the same place"
        )
        if said.num_swayed > MAX_SWAYED_SHARE * said.num_asked:
            remedy = (
                "A place is no preference: such pairs are ties. Name a larger model, or another gate.judge.question."
            )
            return Finding("judge", "warning", detail, remedy)
        return Finding("judge", "ok", detail)

    # Prompts, ends, room

    def _ends(self, rollout: Rollout) -> list[Finding]:
        ended = sum(reason == "stop" for reason in rollout.finish_reasons)
        detail = f"{ended} of {rollout.num_rows} answers ended by themselves"
        found = [Finding("end_of_text", "ok", detail)]
        if ended == 0:
            remedy = "Raise rollout.max_new_tokens, or name what ends an answer in rollout.stop_ids or stop_strings."
            found = [Finding("end_of_text", "warning", detail, remedy)]
        pad, end = self._tokenizer.pad_token_id, self._tokenizer.eos_token_id
        if pad is not None and pad == end:
            detail = f"pad and end-of-text are the same id {pad}: harmless here, where lengths say what is padding"
            found.append(Finding("pad_token", "warning", detail, "Other programs may drop the end-of-text of answers."))
        else:
            found.append(Finding("pad_token", "ok", f"pad id {pad}, end-of-text id {end}"))
        return found

    def _too_long(self) -> list[Finding]:
        num, limit = self._prompts.num_too_long, self._spec.data.max_prompt_tokens
        if num:
            done = "are cut" if self._spec.data.too_long == "cut" else "are left out"
            detail = f"{num} prompts are longer than data.max_prompt_tokens {limit} and {done}"
            return [Finding("prompts", "warning", detail, "Raise data.max_prompt_tokens, or shorten the prompts.")]
        return [Finding("prompts", "ok", f"all {len(self._prompts)} prompts have at most {limit} tokens")]

    def _room(self) -> list[Finding]:
        numbers = estimate(self._spec)
        found = [Finding("meaning", "ok", "; ".join(numbers.meaning))]
        free = self._models.ranks.first(lambda: shutil.disk_usage(self._segment.path).free)
        if numbers.disk_bytes is not None:
            detail = f"about {numbers.disk_bytes / 2**30:.2f} GiB of disk, {free / 2**30:.2f} GiB are free"
            short = numbers.disk_bytes > free
            remedy = "Free space, or lower checkpoints.keep_last." if short else ""
            found.append(Finding("disk", "warning" if short else "ok", detail, remedy))
        if numbers.memory is not None and self._spec.resources.gpus == 0:
            there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            there = self._models.ranks.first(lambda: there)
            needed = numbers.memory.host_bytes
            detail = f"about {needed / 2**30:.2f} GiB of memory, the machine has {there / 2**30:.2f} GiB"
            remedy = "Lower update.token_budget or rollout.batch_size." if needed > there else ""
            found.append(Finding("memory", "warning" if needed > there else "ok", detail, remedy))
        return found
