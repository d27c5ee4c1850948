"""Training and held-out prompts: read once, tokenised once, and dealt out in a seeded order.

The cursor counts prompts used since the start of the run. With the seed it decides what comes next, so a resumed run
goes on where it was, and nothing else has to be remembered. It does not know batches, ranks or models.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ppo_core.errors import DataError
from ppo_core.seeds import generator
from ppo_core.spec.files import read_prompt


@dataclass(frozen=True)
class PromptBatch:
    """Prompts in order: their ids, their texts, and their numbers in their file, from 0, empty lines not counted."""

    prompt_ids: list[list[int]]
    texts: list[str]
    indices: list[int]


class PromptSource:
    """The prompts of one JSON Lines file that are not too long.

    Each is tokenised once: exactly one begin-of-text id where the tokenizer has one, no other special token. What
    looks like a special token in a prompt is text.

    Args:
        path: JSON Lines, `{"prompt": text}` a row; empty lines are skipped.
        tokenizer: the policy's.
        max_prompt_tokens: longer prompts are dropped and counted, begin-of-text included.
        seed: the run's.
        min_prompts: fewer usable prompts than this are refused.

    Raises:
        DataError: a row is unfit (file and row are named), or too few prompts are left.
    """

    def __init__(
        self, path: str | Path, tokenizer: Any, max_prompt_tokens: int, seed: int, *, min_prompts: int = 1
    ) -> None:
        texts = _read(Path(path))
        ids = prompt_tokens(tokenizer, texts)
        empty = [number for number, row in enumerate(ids) if not row]
        if empty:
            raise DataError(f"{path}: prompt {texts[empty[0]]!r} becomes no token at all")
        usable = [index for index, row in enumerate(ids) if len(row) <= max_prompt_tokens]
        self.num_dropped = len(texts) - len(usable)
        if len(usable) < min_prompts:
            raise DataError(
                f"{path}: {len(usable)} of {len(texts)} prompts have at most {max_prompt_tokens} tokens, "
                f"{min_prompts} are needed",
                hint="Add prompts, raise data.max_prompt_tokens or lower the batch size.",
            )
        self._texts, self._ids, self._usable, self._seed = texts, ids, usable, seed
        self._order = lru_cache(maxsize=2)(self._order_of)

    def __len__(self) -> int:
        return len(self._usable)

    def num_filtered(self, cursor: int) -> int:
        """Too long prompts that were passed over before the prompt at the cursor: used + filtered = consumed."""
        epoch, offset = divmod(cursor, len(self))
        _, places = self._order(epoch)
        return epoch * self.num_dropped + (places[offset - 1] + 1 - offset if offset else 0)

    def take(self, cursor: int, num_prompts: int) -> PromptBatch:
        """The `num_prompts` prompts after the first `cursor`; a batch may run over the end of an epoch."""
        places = [divmod(place, len(self)) for place in range(cursor, cursor + num_prompts)]
        return self._batch([self._order(epoch)[0][offset] for epoch, offset in places])

    def first(self, num_prompts: int) -> PromptBatch:
        """The first prompts in the file's order, all of them if there are fewer."""
        return self._batch(self._usable[:num_prompts])

    def _batch(self, indices: list[int]) -> PromptBatch:
        return PromptBatch(
            prompt_ids=[self._ids[index] for index in indices],
            texts=[self._texts[index] for index in indices],
            indices=indices,
        )

    def _order_of(self, epoch: int) -> tuple[list[int], list[int]]:
        """One epoch's usable prompts in order, and each one's place among all prompts, the too long ones included."""
        usable = set(self._usable)
        everything = torch.randperm(len(self._texts), generator=generator(self._seed, "prompts", epoch)).tolist()
        placed = [(index, place) for place, index in enumerate(everything) if index in usable]
        return [index for index, _ in placed], [place for _, place in placed]


def prompt_tokens(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Ids of each text, with exactly one begin-of-text id in front where the tokenizer has one.

    A text that was rendered with a begin-of-text token in front does not get a second one (huggingface/trl#3853).
    """
    if not texts:
        return []
    bos = tokenizer.bos_token
    if bos is not None:
        texts = [text.removeprefix(bos) for text in texts]
    # Specials in the text are split like any other text: a prompt must not be able to end itself.
    rows: list[list[int]] = tokenizer(
        texts, add_special_tokens=False, split_special_tokens=True, return_attention_mask=False
    )["input_ids"]
    return rows if bos is None else [[tokenizer.bos_token_id, *row] for row in rows]


def _read(path: Path) -> list[str]:
    texts = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    texts.append(read_prompt(line))
                except ValueError as problem:
                    raise DataError(f"{path}, row {number}: {problem}") from problem
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    return texts
