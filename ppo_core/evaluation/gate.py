"""The judge gate: has the training score risen while a judge that is not the reward sees no gain?

Answers to the same held-out prompts are compared pair by pair: with those of the last gate and with the starting
policy's. The judge scores each answer by itself, so there is no order of presentation to balance. Pure functions of
scores; None stands for an answer without a usable score, whose pairs are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ppo_core.masked import masked_mean, masked_var

Judged = Sequence[float | None]

# Two-sided 95 % of the normal distribution.
Z_95 = 1.959964


@dataclass(frozen=True)
class WinRate:
    """How often the newer answer is preferred; a tie counts half.

    `low` and `high` are the 95 % Wilson score interval with wins + ties / 2 as successes. With ties it is wider than
    it need be, for a tie varies less than a win or a loss. All three are None without a pair.
    """

    wins: int
    ties: int
    losses: int
    rate: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Rise:
    """Mean difference of paired scores, now minus then, and its standard error; None with fewer than two pairs."""

    mean: float | None
    standard_error: float | None

    @property
    def is_significant(self) -> bool:
        """Above zero by more than twice its standard error."""
        return self.mean is not None and self.standard_error is not None and self.mean > 2 * self.standard_error


@dataclass(frozen=True)
class GateState:
    """What the next gate needs of the past; plain numbers, kept in checkpoints."""

    start_judged: list[float | None]  #: the judge's scores of the starting policy's answers
    last_judged: list[float | None]  #: of the last gate's
    last_scores: list[float | None]  #: the training reward's scores of the last gate's answers
    num_suspect: int  #: gates in a row whose training score rose while the win rate was at most one half

    @classmethod
    def start(cls, scores: Judged, judged: Judged) -> GateState:
        return cls(list(judged), list(judged), list(scores), 0)

    @classmethod
    def of(cls, document: dict[str, Any]) -> GateState:
        return cls(**document)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Verdict:
    """One gate: the evidence, whether it trips, why in words, and the state for the next."""

    against_last: WinRate
    against_start: WinRate
    rise: Rise
    tripped: bool
    explanation: str
    state: GateState

    def metrics(self) -> dict[str, float | None]:
        """By registry key."""
        return {
            "judge/win_rate": self.against_last.rate,
            "judge/win_rate_low": self.against_last.low,
            "judge/win_rate_high": self.against_last.high,
            "judge/win_rate_vs_start": self.against_start.rate,
        }


def judge_verdict(state: GateState, scores: Judged, judged: Judged) -> Verdict:
    """Hold a gate.

    It trips when the training score has risen since the last gate, by more than twice its standard error, and either
    the win rate's interval lies below one half, or the win rate was at most one half at two such gates in a row.

    Args:
        state: of the last gate, or the start.
        scores: the training reward's scores of the answers, by held-out prompt.
        judged: the judge's, in the same order.
    """
    against_last, against_start = win_rate(judged, state.last_judged), win_rate(judged, state.start_judged)
    rise = paired_rise(scores, state.last_scores)
    not_won = against_last.rate is not None and against_last.rate <= 0.5
    num_suspect = state.num_suspect + 1 if rise.is_significant and not_won else 0
    worse = against_last.high is not None and against_last.high < 0.5
    tripped = rise.is_significant and (worse or num_suspect >= 2)
    return Verdict(
        against_last=against_last,
        against_start=against_start,
        rise=rise,
        tripped=tripped,
        explanation=_explanation(against_last, rise, worse, num_suspect, tripped),
        state=GateState(state.start_judged, list(judged), list(scores), num_suspect),
    )


def win_rate(now: Judged, then: Judged) -> WinRate:
    """Compare answers prompt by prompt, as far as both lists go."""
    pairs = _pairs(now, then)
    wins = sum(1 for a, b in pairs if a > b)
    ties = sum(1 for a, b in pairs if a == b)
    if not pairs:
        return WinRate(0, 0, 0, None, None, None)
    rate = (wins + ties / 2) / len(pairs)
    low, high = wilson_interval(rate, len(pairs))
    return WinRate(wins, ties, len(pairs) - wins - ties, rate, low, high)


def wilson_interval(share: float, num: int) -> tuple[float, float]:
    """95 % score interval of a share of `num` trials.

    Example: 0.5 of 100 gives 0.4038 to 0.5962.
    Source: Wilson 1927, Journal of the American Statistical Association 22, 209-212.
    """
    spread = Z_95**2 / num
    centre = (share + spread / 2) / (1 + spread)
    half = math.sqrt(share * (1 - share) * spread + spread**2 / 4) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


def paired_rise(now: Judged, then: Judged) -> Rise:
    """Mean of now - then over prompts scored both times, and its standard error (sample deviation / root of n)."""
    differences = torch.tensor([a - b for a, b in _pairs(now, then)], dtype=torch.float64)
    num = differences.numel()
    if num < 2:
        return Rise(None, None)
    every = torch.ones_like(differences, dtype=torch.bool)
    variance = float(masked_var(differences, every)) * num / (num - 1)
    return Rise(float(masked_mean(differences, every)), math.sqrt(variance / num))


def _pairs(now: Judged, then: Judged) -> list[tuple[float, float]]:
    return [(a, b) for a, b in zip(now, then, strict=False) if a is not None and b is not None]


def _explanation(against: WinRate, rise: Rise, worse: bool, num_suspect: int, tripped: bool) -> str:
    if against.rate is None or rise.mean is None or rise.standard_error is None:
        return "The gate has too few usable scores to tell anything."
    evidence = (
        f"since the last gate the training score moved by {rise.mean:+.3g} (standard error {rise.standard_error:.2g}), "
        f"while the judge preferred the new answers in {against.rate:.0%} of pairs "
        f"(95 % interval {against.low:.2f} to {against.high:.2f}; {against.wins} won, {against.ties} tied, "
        f"{against.losses} lost)"
    )
    if not tripped:
        return f"The gate is passed: {evidence}."
    why = "the interval lies below one half" if worse else f"it is gate {num_suspect} in a row at or below one half"
    return f"The gate has tripped: {evidence}, and {why}."
