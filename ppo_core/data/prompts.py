"""Training and held-out prompts: read once, tokenised once, and dealt out in a seeded order.

The cursor counts prompts used since the start of the run. With the seed it decides what comes next, so a resumed run
goes on where it was, and nothing else has to be remembered. It does not know batches, ranks or models.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch

from ppo_core.data.hub import numbered_prompts
from ppo_core.data.tokens import conversation_ids, cut, text_ids
from ppo_core.errors import DataError
from ppo_core.seeds import generator
from ppo_core.spec.prompt_rows import Prompt, prompt_text


@dataclass(frozen=True)
class PromptBatch:
    """Prompts in order: their ids, their texts, and their numbers in their file, from 0, empty lines not counted.

    The ids are what the engine is given and what the trainer holds. The texts are what scorers are given and samples
    show.
    """

    prompt_ids: list[list[int]]
    texts: list[str]
    indices: list[int]


class PromptSource:
    """The prompts of one file or folder, each tokenised once: exactly one begin-of-text id where there is one.

    Args:
        path: JSON Lines, CSV, Parquet, a folder that the `datasets` library saved, or `hub:owner/name`.
        tokenizer: the policy's.
        max_prompt_tokens: longest prompt, begin-of-text included.
        seed: of the order.
        too_long: longer prompts are left out (`drop`), or only their end is kept (`cut`) and their text is what is
            left of them.
        min_prompts: fewer usable prompts than this are refused.

    Raises:
        DataError: a row is unfit (file and row are named), or too few prompts are left.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: Any,
        max_prompt_tokens: int,
        seed: int,
        *,
        too_long: Literal["drop", "cut"] = "drop",
        min_prompts: int = 1,
    ) -> None:
        rows = list(numbered_prompts(str(path)))
        ids = _ids(path, tokenizer, rows)
        texts = [prompt_text(prompt) for _, prompt in rows]
        empty = [number for number, row in enumerate(ids) if not row]
        if empty:
            raise DataError(f"{path}: prompt {texts[empty[0]]!r} becomes no token at all")
        longer = [index for index, row in enumerate(ids) if len(row) > max_prompt_tokens]
        if too_long == "cut":
            for index in longer:
                ids[index] = cut(ids[index], max_prompt_tokens, tokenizer.bos_token_id)
                texts[index] = tokenizer.decode(ids[index], skip_special_tokens=True)
        dropped = set(longer) if too_long == "drop" else set()
        usable = [index for index in range(len(ids)) if index not in dropped]
        if len(usable) < min_prompts:
            raise DataError(
                f"{path}: {len(usable)} of {len(texts)} prompts have at most {max_prompt_tokens} tokens, "
                f"{min_prompts} are needed",
                hint="Add prompts, raise data.max_prompt_tokens or lower the batch size.",
            )
        self.num_too_long = len(longer)
        self._num_dropped = len(dropped)
        self._texts, self._ids, self._usable, self._seed = texts, ids, usable, seed
        self._order = lru_cache(maxsize=2)(self._order_of)

    def __len__(self) -> int:
        return len(self._usable)

    def num_filtered(self, cursor: int) -> int:
        """Too long prompts that were passed over before the prompt at the cursor: used + filtered = consumed."""
        epoch, offset = divmod(cursor, len(self))
        _, places = self._order(epoch)
        return epoch * self._num_dropped + (places[offset - 1] + 1 - offset if offset else 0)

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
        """One epoch's usable prompts in order, and each one's place among all prompts, the dropped ones included."""
        usable = set(self._usable)
        everything = torch.randperm(len(self._texts), generator=generator(self._seed, "prompts", epoch)).tolist()
        placed = [(index, place) for place, index in enumerate(everything) if index in usable]
        return [index for index, _ in placed], [place for _, place in placed]


def _ids(path: str | Path, tokenizer: Any, rows: list[tuple[int, Prompt]]) -> list[list[int]]:
    plain = iter(text_ids(tokenizer, [prompt for _, prompt in rows if isinstance(prompt, str)]))
    ids = []
    for number, prompt in rows:
        try:
            ids.append(next(plain) if isinstance(prompt, str) else conversation_ids(tokenizer, prompt))
        except DataError as error:
            raise DataError(f"{path}, row {number}: {error}", hint=error.hint) from error
    return ids
