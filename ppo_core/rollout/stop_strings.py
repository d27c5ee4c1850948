"""Texts that end a response: whether one has just appeared in the text of the newest tokens."""

from __future__ import annotations

from typing import Any


class StopStrings:
    """A response ends at the token in whose text, joined with what came before it, a stop string appears.

    Args:
        tokenizer: decodes ids; special tokens have no text.
        strings: the texts; none of them empty.
    """

    def __init__(self, tokenizer: Any, strings: list[str]) -> None:
        self._tokenizer = tokenizer
        self._strings = strings
        # A stop string of n characters has at most 4 n bytes, and a token has at least one.
        self._tail = max((4 * len(text) + 4 for text in strings), default=0)

    def __bool__(self) -> bool:
        return bool(self._strings)

    def just_appeared(self, ids: list[int]) -> bool:
        """Whether a stop string is in the text of the last of a response's ids."""
        text = self._tokenizer.decode(ids[-self._tail :], skip_special_tokens=True)
        return any(stop in text for stop in self._strings)
