"""From prompts to ids: exactly one begin-of-text in front, and nothing that a row says becomes a control id.

Plain texts and conversations go through the same last step, so that the engine and the trainer are given one list of
ids and nobody tokenises again. It knows no file and no order.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

from jinja2 import TemplateError

from ppo_core.errors import DataError
from ppo_core.spec.prompt_rows import Conversation


def text_ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Ids of each text, with exactly one begin-of-text id in front where the tokenizer has one.

    A text that was rendered with a begin-of-text token in front does not get a second one (huggingface/trl#3853).
    """
    bos = tokenizer.bos_token
    if bos is not None:
        texts = [text.removeprefix(bos) for text in texts]
    return [_with_bos(tokenizer, row) for row in _without_specials(tokenizer, texts)]


def conversation_ids(tokenizer: Any, conversation: Conversation) -> list[int]:
    """Ids of a conversation: the chat template applied once, up to where the answer begins.

    Control tokens are the template's alone. Where a message spells one, a placeholder goes through the template in its
    stead and the spelling is tokenised as text, so a message cannot end its own turn. All other text is tokenised in
    one piece with the template's, as the model was trained to read it.

    Raises:
        DataError: the tokenizer has no chat template, or the template refuses this conversation.
    """
    if not tokenizer.chat_template:
        raise DataError(
            "it holds `messages`, but the policy's tokenizer has no chat template",
            hint="Save a chat template with the tokenizer (chat_template.jinja), or give `prompt` texts.",
        )
    specials = re.compile("|".join(re.escape(text) for text in _special_texts(tokenizer)) or r"(?!)")
    # Of the contents themselves, so that the same row gives the same ids and no content can hold it.
    mark = "spelled" + hashlib.sha256("\0".join(message.content for message in conversation).encode()).hexdigest()[:24]
    spelled: list[str] = []

    def hide(found: re.Match[str]) -> str:
        spelled.append(found.group())
        return f"{mark}n{len(spelled) - 1}n"

    messages = [{"role": turn.role, "content": specials.sub(hide, turn.content)} for turn in conversation]
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise DataError(
            f"the chat template of the policy's tokenizer refuses it: {reason}",
            hint="Roles and their order must be those that the model's chat template knows.",
        ) from error
    if tokenizer.bos_token is not None:
        rendered = rendered.removeprefix(tokenizer.bos_token)
    pieces = re.split(rf"{mark}n(\d+)n", rendered)
    if any(mark in piece.lower() for piece in pieces):
        raise DataError("a message spells a control token and the chat template changes it, so it cannot be kept text")
    ids: list[int] = []
    for place, piece in enumerate(pieces):
        if place % 2:
            ids += _without_specials(tokenizer, [spelled[int(piece)]])[0]
        elif piece:
            row = tokenizer(piece, add_special_tokens=False, split_special_tokens=False, return_attention_mask=False)
            ids += row["input_ids"]
    return _with_bos(tokenizer, ids)


def cut(ids: list[int], limit: int, bos_id: int | None) -> list[int]:
    """The end of a prompt in at most `limit` tokens, its begin-of-text kept."""
    if len(ids) <= limit:
        return ids
    if bos_id is None or ids[0] != bos_id:
        return ids[len(ids) - limit :]
    return [bos_id, *ids[len(ids) - limit + 1 :]]


def _without_specials(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Ids of texts in which control tokens are split like any other text: a prompt must not be able to end itself."""
    if not texts:
        return []
    rows: list[list[int]] = tokenizer(
        texts, add_special_tokens=False, split_special_tokens=True, return_attention_mask=False
    )["input_ids"]
    return rows


def _with_bos(tokenizer: Any, ids: list[int]) -> list[int]:
    return ids if tokenizer.bos_token is None else [tokenizer.bos_token_id, *ids]


def _special_texts(tokenizer: Any) -> list[str]:
    """What control tokens look like, the longest first, so that none hides in another."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return sorted(added | set(tokenizer.all_special_tokens), key=lambda text: (-len(text), text))
