"""A reward model in Hugging Face sequence-classification form, with one output.

It reads text, not the policy's ids: its own tokenizer and template make its tokens. The score is read at a row's last
real token by recorded length, so neither padding nor its side can move it. It computes in the trainer's own process;
the deadline is looked at between forward passes, and one that never returns cannot be ended from here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification

from ppo_core.errors import DataError
from ppo_core.models.loading import caps_attention_scores, load_tokenizer, whole_weights
from ppo_core.scoring.source import Unusable, not_asked_to_end
from ppo_core.spec.scorers import Scorer
from ppo_core.spec.text_template import TextTemplate

# Tokens of one forward pass, padding included.
BATCH_TOKENS = 8192
# Prompt followed by response.
PLAIN = "{prompt}{response}"


class Reading(Protocol):
    """How prompt and response become the ids that a reward model reads."""

    def ids(self, tokenizer: Any, prompt: str, response: str) -> list[int] | Unusable: ...


class SequenceClassifier:
    """Scores each prompt with its response, read as one text.

    Args:
        path: the model's folder.
        timeout_s: seconds that one batch of scores may take; rows not begun by then have none.
        reading: how the text is made; None: prompt followed by response.

    Raises:
        DataError: the model cannot be loaded, has not exactly one output, or lacks the chat template asked for.
    """

    def __init__(self, path: str | Path, timeout_s: float = 60.0, reading: Reading | None = None) -> None:
        try:
            config = AutoConfig.from_pretrained(str(path), trust_remote_code=False)
            with whole_weights(path):
                loaded: Any = AutoModelForSequenceClassification.from_pretrained(
                    str(path),
                    config=config,
                    attn_implementation="eager" if caps_attention_scores(config) else None,
                    dtype=torch.float32,
                    trust_remote_code=False,
                    use_safetensors=True,
                    output_loading_info=True,
                )
        except DataError:
            raise
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
        self._timeout_s, self._reading = timeout_s, reading or TextReading(TextTemplate.parse(PLAIN))
        if isinstance(self._reading, ChatReading) and not self._tokenizer.chat_template:
            raise DataError(f"the tokenizer in {str(path)!r} has no chat template", hint="Give `template` instead.")
        self._max_tokens = _max_tokens(self._model.config, self._tokenizer)
        self._num_ids = int(self._model.get_input_embeddings().num_embeddings)
        # Padding is masked, so any id that the model knows does.
        pad_id = self._tokenizer.pad_token_id or 0
        self._pad_id = pad_id if pad_id < self._num_ids else 0

    @torch.inference_mode()
    def score(
        self, prompts: Sequence[str], responses: Sequence[str], check: Callable[[], None] = not_asked_to_end
    ) -> list[object]:
        deadline = time.monotonic() + self._timeout_s
        read = [
            self._reading.ids(self._tokenizer, whole(prompt), whole(response))
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        rows = [[] if isinstance(row, Unusable) else row for row in read]
        results: list[object] = [row if isinstance(row, Unusable) else self._unfit(row) for row in read]
        fit = sorted((row for row, unfit in enumerate(results) if unfit is None), key=lambda row: len(rows[row]))
        for batch in _batches(fit, rows):
            check()
            if time.monotonic() >= deadline:
                late = Unusable("timeout", f"the reward model did not get to it within {self._timeout_s:g} s")
                results = [late if result is None else result for result in results]
                break
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
        if max(row) >= self._num_ids:
            return Unusable("unknown_id", f"its tokenizer gives id {max(row)}, the reward model knows {self._num_ids}")
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


class TextReading:
    """One text by a template. What looks like a special token in it, or in the template, is text."""

    def __init__(self, template: TextTemplate) -> None:
        self._template = template

    def ids(self, tokenizer: Any, prompt: str, response: str) -> list[int] | Unusable:
        text = self._template.filled(prompt, response)
        ids: list[int] = tokenizer(text, split_special_tokens=True, return_attention_mask=False)["input_ids"]
        return ids


class ChatReading:
    """A user's and an assistant's turn, by the tokenizer's own chat template.

    The template's special tokens are real ones. So a prompt or response that spells one has no score: it could end its
    turn and speak for the other side.
    """

    def ids(self, tokenizer: Any, prompt: str, response: str) -> list[int] | Unusable:
        special = {*tokenizer.all_special_tokens, *map(str, _special_added(tokenizer))}
        spelled = sorted(token for token in special if token in prompt or token in response)
        if spelled:
            return Unusable("control_token", f"the text spells the special token {spelled[0]!r}")
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        try:
            text = tokenizer.apply_chat_template(turns, tokenize=False)
        except Exception as error:  # A template raises what its author chose, for the texts that it cannot place.
            return Unusable("error", f"the chat template failed: {type(error).__name__}: {error}"[:1000])
        # The template has put in all special tokens that belong there, the first one included.
        ids: list[int] = tokenizer(text, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        return ids


def reading_of(scorer: Scorer) -> Reading:
    """The reading that a spec asks for."""
    return ChatReading() if scorer.chat_template else TextReading(TextTemplate.parse(scorer.template or PLAIN))


def whole(text: str) -> str:
    """Text that a tokenizer can take: half a surrogate pair becomes U+FFFD, two halves that belong together one."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _special_added(tokenizer: Any) -> list[Any]:
    return [token for token in tokenizer.added_tokens_decoder.values() if token.special]


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
