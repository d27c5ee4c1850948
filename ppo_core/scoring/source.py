"""The seam to whatever scores: texts in, one result a response out, faults included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

# By these words unusable scores are counted; docs/reward-sources.md says what each means.
Reason = Literal[
    "nan",
    "infinite",
    "missing",
    "wrong_type",
    "wrong_count",
    "timeout",
    "error",
    "died",
    "too_long",
    "empty_text",
    "unknown_id",
    "control_token",
    "unreachable",
    "forbidden_address",
    "http_status",
    "bad_answer",
]


# What a judge that compares says of a pair: the newer answer is better (1), the older one (-1), neither (0); None: it
# gave no verdict.
Preference = float | None

# How long a stop may wait for whoever waits for scores.
CHECK_EVERY_S = 0.2


def not_asked_to_end() -> None:
    """The check of those who wait for all scores, whatever else is asked."""


@dataclass(frozen=True)
class Unusable:
    """Why one response has no score, in a word to count by, and in more words for the log."""

    reason: Reason
    detail: str = ""


class RewardSource(Protocol):
    """One scorer. Its results are not trusted: whoever asks checks number, type and value of each."""

    def score(
        self, prompts: Sequence[str], responses: Sequence[str], check: Callable[[], None] = not_asked_to_end
    ) -> Sequence[object]:
        """One result a response, in order: a number, or `Unusable`.

        What `check` raises ends it; it is called at least every `CHECK_EVERY_S`, or between two of its own passes.
        """
        ...

    def close(self) -> None:
        """End its processes and give back what it holds."""
        ...
