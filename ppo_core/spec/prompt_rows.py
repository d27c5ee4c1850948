"""What a row of prompts may hold: the one rule for submit, preflight and training, whatever the file's format.

It knows no file and no tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

MAX_PROMPT_CHARACTERS = 1_000_000
_EXPECTED = 'expected an object with a text under "prompt" or a list under "messages"'
# A role becomes part of the template's own text, where control tokens count: it must not be able to spell one.
_ROLE = re.compile(r"[A-Za-z][A-Za-z_-]{0,31}")
_HALF_PAIR = re.compile("[\ud800-\udfff]")


class Message(NamedTuple):
    """One turn of a conversation."""

    role: str
    content: str


Conversation = tuple[Message, ...]
Prompt = str | Conversation  #: a row's `prompt`, or its `messages`


def prompt_of(row: Any) -> Prompt:
    """The prompt of one row, as its file's format gave it. A field that is null counts as absent.

    Raises:
        ValueError: the row is unfit; the message says why.
    """
    if not isinstance(row, Mapping):
        raise ValueError(_EXPECTED)
    text, messages = row.get("prompt"), row.get("messages")
    if text is not None and messages is not None:
        raise ValueError('it has both "prompt" and "messages"; a row has one of them')
    if isinstance(text, str):
        _check_text(text)
        return text
    if isinstance(messages, list):
        return _conversation(messages)
    raise ValueError(_EXPECTED)


def prompt_text(prompt: Prompt) -> str:
    """What scorers are given and samples show of a prompt.

    A conversation of one message is that message's content; one of several is a paragraph a message, `role: content`.
    """
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return prompt[0].content
    return "\n\n".join(f"{message.role}: {message.content}" for message in prompt)


def has_lone_surrogate(text: str) -> bool:
    """Whether a text holds a lone surrogate."""
    return _HALF_PAIR.search(text) is not None


def _check_text(text: str) -> None:
    if not text.strip():
        raise ValueError("the prompt is empty")
    if len(text) > MAX_PROMPT_CHARACTERS:
        raise ValueError(f"the prompt has {len(text)} characters, more than {MAX_PROMPT_CHARACTERS}")
    if has_lone_surrogate(text):
        raise ValueError("the prompt holds half of a surrogate pair, which no encoding can carry")


def _conversation(messages: list[Any]) -> Conversation:
    if not messages:
        raise ValueError('"messages" is empty')
    conversation = tuple(_message(number, message) for number, message in enumerate(messages, start=1))
    if sum(len(message.content) for message in conversation) > MAX_PROMPT_CHARACTERS:
        raise ValueError(f"the messages have more than {MAX_PROMPT_CHARACTERS} characters")
    last = conversation[-1]
    if not last.content.strip():
        raise ValueError("the last message is empty")
    if last.role == "assistant":
        raise ValueError("the last message is the assistant's; a prompt ends with what is to be answered")
    return conversation


def _message(number: int, message: Any) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(f'message {number}: expected an object with "role" and "content"')
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise ValueError(f'message {number}: "role" must be a word like user, got {role!r:.60}')
    if not isinstance(content, str):
        raise ValueError(f'message {number}: "content" must be a text')
    others = [name for name, value in message.items() if name not in ("role", "content") and value is not None]
    if others:  # Left out without a word, it would be another conversation.
        raise ValueError(f'message {number}: has {others[0]!r:.60}; only "role" and "content" are read')
    if has_lone_surrogate(content):
        raise ValueError(f"message {number}: holds half of a surrogate pair, which no encoding can carry")
    return Message(role, content)
