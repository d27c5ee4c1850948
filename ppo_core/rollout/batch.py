"""The record of a rollout: prompts and responses as one padded batch, with everything its engine said of them.

Rows are made with padding on the right; whoever reads them takes it anywhere. Masks come from recorded lengths; the
pad id means nothing.
Texts are for scorers and people and are never encoded again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ppo_core.alignment import response_mask
from ppo_core.data.prompts import PromptBatch
from ppo_core.errors import RolloutError
from ppo_core.models.token_sets import TokenSets, joined
from ppo_core.rollout.engine import FinishReason, Response


@dataclass(frozen=True)
class Rollout:
    """B prompts with their responses. Every field has one entry, or one row, a prompt."""

    input_ids: Tensor  #: [B, L] int64
    attention_mask: Tensor  #: [B, L] int64, 1 on prompt and response tokens
    response_start: Tensor  #: [B] int64, column of the first response token
    response_length: Tensor  #: [B] int64, 0 is legal
    response_mask: Tensor  #: [B, L - 1] bool, on the shifted grid
    engine_logprobs: Tensor  #: [B, L - 1] float32, the engine's own, nats; 0 where masked. Measured, never trained on
    truncated: Tensor  #: [B] bool, cut off at the length limit: its end-of-text is missing
    finish_reasons: tuple[FinishReason, ...]
    prompt_indices: tuple[int, ...]  #: which prompts of their source
    prompt_texts: tuple[str, ...]
    response_texts: tuple[str, ...]
    policy_version: int  #: of the weights that made the responses
    token_sets: tuple[TokenSets, ...] | None = None  #: of each response's tokens; None where every id could be drawn

    @property
    def num_rows(self) -> int:
        return len(self.prompt_texts)

    @property
    def lengths(self) -> Tensor:
        """[B] int64: tokens of each row, prompt and response."""
        return self.attention_mask.sum(dim=1)

    @property
    def num_empty(self) -> int:
        """Responses without a token before the one that ended them."""
        return int((self.response_length <= (~self.truncated).long()).sum())

    def response_ids(self, row: int) -> list[int]:
        """The generated ids of one row."""
        start, length = int(self.response_start[row]), int(self.response_length[row])
        ids: list[int] = self.input_ids[row, start : start + length].tolist()
        return ids

    def token_sets_of(self, rows: Tensor) -> TokenSets | None:
        """The token sets of the given rows [b] (int64), row by row; None where every id could be drawn."""
        return None if self.token_sets is None else joined([self.token_sets[row] for row in rows.tolist()])

    def select(self, rows: Tensor) -> Rollout:
        """The given rows [b] (int64), in that order, at the same width."""
        chosen: list[int] = rows.tolist()
        return replace(
            self,
            input_ids=self.input_ids[rows],
            attention_mask=self.attention_mask[rows],
            response_start=self.response_start[rows],
            response_length=self.response_length[rows],
            response_mask=self.response_mask[rows],
            engine_logprobs=self.engine_logprobs[rows],
            truncated=self.truncated[rows],
            finish_reasons=tuple(self.finish_reasons[row] for row in chosen),
            prompt_indices=tuple(self.prompt_indices[row] for row in chosen),
            prompt_texts=tuple(self.prompt_texts[row] for row in chosen),
            response_texts=tuple(self.response_texts[row] for row in chosen),
            token_sets=None if self.token_sets is None else tuple(self.token_sets[row] for row in chosen),
        )


def assemble(
    prompts: PromptBatch,
    responses: list[Response],
    pad_id: int,
    decode: Callable[[list[int]], str],
    policy_version: int,
) -> Rollout:
    """Put prompts and responses together, padded on the right to the longest row.

    Args:
        prompts: what the engine was given.
        responses: one a prompt, in order.
        pad_id: fills the padding; it may be any id, the end-of-text too.
        decode: ids to text, special tokens left out.
        policy_version: of the engine at generation.

    Raises:
        RolloutError: not one response a prompt, not one logprob or token set a token, token sets for some responses
            only, or a finish reason that is none.
        AlignmentError: a row's mask does not hold as many tokens as were generated.
    """
    if len(responses) != len(prompts.prompt_ids):
        raise RolloutError(f"{len(prompts.prompt_ids)} prompts but {len(responses)} responses")
    for row, response in enumerate(responses):
        if response.finish_reason not in ("stop", "length"):
            raise RolloutError(f"row {row} ended by {response.finish_reason!r}; expected 'stop' or 'length'")
        if len(response.logprobs) != len(response.ids):
            raise RolloutError(f"row {row} has {len(response.ids)} tokens but {len(response.logprobs)} logprobs")
        if response.token_sets is not None and len(response.token_sets) != len(response.ids):
            raise RolloutError(f"row {row} has {len(response.ids)} tokens but {len(response.token_sets)} token sets")
    token_sets = tuple(response.token_sets for response in responses if response.token_sets is not None)
    if token_sets and len(token_sets) != len(responses):
        raise RolloutError(f"only {len(token_sets)} of {len(responses)} responses say which tokens could be drawn")
    starts = torch.tensor([len(ids) for ids in prompts.prompt_ids], dtype=torch.long)
    lengths = torch.tensor([len(response.ids) for response in responses], dtype=torch.long)
    width = int((starts + lengths).max())
    rows = [
        prompt + response.ids + [pad_id] * (width - len(prompt) - len(response.ids))
        for prompt, response in zip(prompts.prompt_ids, responses, strict=True)
    ]
    attention_mask = (torch.arange(width) < (starts + lengths).unsqueeze(1)).long()
    mask = response_mask(attention_mask, starts, lengths)
    said = torch.tensor([logprob for response in responses for logprob in response.logprobs], dtype=torch.float32)
    return Rollout(
        input_ids=torch.tensor(rows, dtype=torch.long),
        attention_mask=attention_mask,
        response_start=starts,
        response_length=lengths,
        response_mask=mask,
        engine_logprobs=torch.zeros(mask.shape).masked_scatter(mask, said),
        truncated=torch.tensor([response.finish_reason == "length" for response in responses]),
        finish_reasons=tuple(response.finish_reason for response in responses),
        prompt_indices=tuple(prompts.indices),
        prompt_texts=tuple(prompts.texts),
        response_texts=tuple(
            response_text(prompt, response.ids, decode)
            for prompt, response in zip(prompts.prompt_ids, responses, strict=True)
        ),
        policy_version=policy_version,
        token_sets=token_sets or None,
    )


def response_text(prompt_ids: list[int], ids: list[int], decode: Callable[[list[int]], str]) -> str:
    """The response's part of the whole row's text.

    Decoded alone, many tokenizers drop the space that separates it from the prompt.
    """
    whole, prompt = decode(prompt_ids + ids), decode(prompt_ids)
    return whole[len(prompt) :] if whole.startswith(prompt) else decode(ids)
