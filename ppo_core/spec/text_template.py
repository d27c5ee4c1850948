"""The text that a reward model reads, made of prompt and response by a template. The template is never run.

A template has `{prompt}` and `{response}` and otherwise stands for itself; `{{` and `}}` are braces. What is put in is
put in as it is: braces in a prompt or response are text.
"""

from __future__ import annotations

from dataclasses import dataclass
from string import Formatter

FIELDS = ("prompt", "response")


@dataclass(frozen=True)
class TextTemplate:
    """`pieces` in order: (True, name of a field) or (False, text)."""

    pieces: tuple[tuple[bool, str], ...]

    @classmethod
    def parse(cls, text: str) -> TextTemplate:
        """Read a template.

        Raises:
            ValueError: another placeholder, one with a format or an attribute, one twice, or no `{response}`.
        """
        pieces: list[tuple[bool, str]] = []
        try:
            parsed = list(Formatter().parse(text))
        except ValueError as error:
            raise ValueError(f"not a template ({error}); write {{{{ and }}}} for braces") from error
        for literal, name, form, conversion in parsed:
            if literal:
                pieces.append((False, literal))
            if name is None:
                continue
            if name not in FIELDS or form or conversion:
                raise ValueError(
                    f"the placeholder {name!r} is not known; there are {{prompt}} and {{response}}, without formats, "
                    "and {{ and }} for braces"
                )
            pieces.append((True, name))
        names = [name for is_field, name in pieces if is_field]
        if "response" not in names:
            raise ValueError("the template has no {response}, so all responses would score alike; put it in")
        if len(names) != len(set(names)):
            raise ValueError("the template has a placeholder twice; use {prompt} and {response} once each")
        return cls(tuple(pieces))

    def filled(self, prompt: str, response: str) -> str:
        """The template's text with both put in."""
        values = {"prompt": prompt, "response": response}
        return "".join(values[piece] if is_field else piece for is_field, piece in self.pieces)
