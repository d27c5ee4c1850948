"""The seam to whatever scores: texts in, one result a response out, faults included."""

from __future__ import annotations

from collections.abc import Sequence
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


@dataclass(frozen=True)
class Unusable:
    """Why one response has no score, in a word to count by, and in more words for the log."""

    reason: Reason
    detail: str = ""


class RewardSource(Protocol):
    """One scorer. Its results are not trusted: whoever asks checks number, type and value of each."""

    def score(self, prompts: Sequence[str], responses: Sequence[str]) -> Sequence[object]:
        """One result a response, in order: a number, or `Unusable`."""
        ...

    def close(self) -> None:
        """End its processes and give back what it holds."""
        ...
