"""A reward model in Hugging Face sequence-classification form, with one output.

It reads text, not the policy's ids: its own tokenizer and template make its tokens. The score is read at a row's last
real token by recorded length, so neither padding nor its side can move it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification

from ppo_core.errors import DataError
from ppo_core.models.loading import caps_attention_scores, load_tokenizer
from ppo_core.scoring.source import Unusable

# Tokens of one forward pass, padding included.
BATCH_TOKENS = 8192


class SequenceClassifier:
    """Scores prompt + response as one text.

    Raises:
        DataError: the model cannot be loaded, or has not exactly one output.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            config = AutoConfig.from_pretrained(str(path), trust_remote_code=False)
            loaded: Any = AutoModelForSequenceClassification.from_pretrained(
                str(path),
                config=config,
                attn_implementation="eager" if caps_attention_scores(config) else None,
                dtype=torch.float32,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise DataError(f"no sequence classifier can be loaded from {str(path)!r}: {error}") from error
        self._model, report = loaded
        if report["missing_keys"]:
            # A head filled with random numbers would be a reward of noise.
            missing = sorted(report["missing_keys"])
            raise DataError(f"{str(path)!r} has no trained {missing[0]}: it is not a reward model")
        if self._model.config.num_labels != 1:
            raise DataError(f"{str(path)!r} has {self._model.config.num_labels} outputs, a reward model has 1")
        self._model.eval().requires_grad_(False)
        self._tokenizer = load_tokenizer(path)
        self._max_tokens = _max_tokens(self._model.config, self._tokenizer)
        # Padding is masked, so any id of the vocabulary does.
        self._pad_id = self._tokenizer.pad_token_id or 0

    @torch.inference_mode()
    def score(self, prompts: Sequence[str], responses: Sequence[str]) -> list[object]:
        texts = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        # What looks like a special token in a text is text.
        rows: list[list[int]] = self._tokenizer(texts, split_special_tokens=True, return_attention_mask=False)[
            "input_ids"
        ]
        results: list[object] = [self._unfit(row) for row in rows]
        fit = sorted((row for row, unfit in enumerate(results) if unfit is None), key=lambda row: len(rows[row]))
        for batch in _batches(fit, rows):
            for row, score in zip(batch, self._scores([rows[row] for row in batch]), strict=True):
                results[row] = score
        return results

    def close(self) -> None:
        """Nothing is held but memory."""

    def _unfit(self, row: list[int]) -> Unusable | None:
        if not row:
            return Unusable("empty_text", "the text becomes no token")
        if self._max_tokens is not None and len(row) > self._max_tokens:
            return Unusable("too_long", f"{len(row)} tokens, the reward model reads {self._max_tokens}")
        return None

    def _scores(self, rows: list[list[int]]) -> list[float]:
        lengths = torch.tensor([len(row) for row in rows])
        width = int(lengths.max())
        ids = torch.tensor([row + [self._pad_id] * (width - len(row)) for row in rows])
        mask = (torch.arange(width) < lengths.unsqueeze(1)).long()
        scores = self._last_scores(ids, mask, lengths).float().tolist()
        return [float(score) for score in scores]

    def _last_scores(self, ids: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        head = getattr(self._model, "score", None)
        if not isinstance(head, nn.Linear):
            # An encoder: it pools by its own rule, which padding on the right under a mask does not reach.
            logits: Tensor = self._model(input_ids=ids, attention_mask=mask).logits
            return logits.squeeze(-1)
        # A decoder. Not its own forward: that looks for the last id that is not the pad id, and where pad and
        # end-of-text are one it reads before a real end.
        hidden = self._model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        scores: Tensor = head(hidden[torch.arange(len(lengths)), lengths - 1])
        return scores.squeeze(-1)


def _batches(rows: list[int], ids: list[list[int]]) -> Iterator[list[int]]:
    """Rows, shortest first, in batches of at most BATCH_TOKENS tokens; a longer row stands alone."""
    batch: list[int] = []
    for row in rows:
        if batch and (len(batch) + 1) * len(ids[row]) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _max_tokens(config: Any, tokenizer: Any) -> int | None:
    """The shorter of what model and tokenizer allow; None when neither says."""
    limits = [getattr(config, "max_position_embeddings", None), tokenizer.model_max_length]
    said = [int(limit) for limit in limits if limit is not None and 0 < limit < 10**9]
    return min(said, default=None)
