"""The judge gate: has the training score risen while a judge that is not the reward sees no gain?

Answers to the same held-out prompts are compared pair by pair: with those of the last gate and with the starting
policy's. A judge that scores each answer by itself has no order of presentation to balance; one that compares is asked
in both orders (`ppo_core.scoring.pair_judge`). Pure functions; None stands for an answer without a usable score or a
pair without a verdict, which is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ppo_core.masked import masked_mean, masked_var
from ppo_core.scoring.source import Preference

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
class Verdict:
    """One gate: the evidence, whether it trips, and why in words."""

    against_last: WinRate
    against_start: WinRate
    rise: Rise
    num_suspect: int  #: gates in a row, this one included, whose training score rose while at most half was won
    tripped: bool
    explanation: str

    def metrics(self) -> dict[str, float | None]:
        """By registry key."""
        return {
            "judge/win_rate": self.against_last.rate,
            "judge/win_rate_low": self.against_last.low,
            "judge/win_rate_high": self.against_last.high,
            "judge/win_rate_vs_start": self.against_start.rate,
            "judge/win_rate_vs_start_low": self.against_start.low,
            "judge/win_rate_vs_start_high": self.against_start.high,
        }

    def as_dict(self) -> dict[str, Any]:
        """What the journal tells of it."""
        return asdict(self)


def judge_verdict(rise: Rise, against_last: WinRate, against_start: WinRate, num_suspect: int) -> Verdict:
    """Hold a gate.

    It trips when the training score has risen since the last gate, by more than twice its standard error, and either
    the win rate's interval lies below one half, or the win rate was at most one half at two such gates in a row.

    Args:
        rise: of the training reward's scores of the answers, since the last gate.
        against_last: the judge on these answers and the last gate's.
        against_start: on these and the starting policy's.
        num_suspect: the last gate's; 0 at the first.
    """
    not_won = against_last.rate is not None and against_last.rate <= 0.5
    num_suspect = num_suspect + 1 if rise.is_significant and not_won else 0
    worse = against_last.high is not None and against_last.high < 0.5
    tripped = rise.is_significant and (worse or num_suspect >= 2)
    explanation = _explanation(against_last, rise, worse, num_suspect, tripped)
    return Verdict(against_last, against_start, rise, num_suspect, tripped, explanation)


def win_rate(now: Judged, then: Judged) -> WinRate:
    """Compare answers by their scores, prompt by prompt, as far as both lists go."""
    return win_rate_of([float((a > b) - (a < b)) for a, b in _pairs(now, then)])


def win_rate_of(preferences: Sequence[Preference]) -> WinRate:
    """Count verdicts by pair: 1 for the newer answer, 0 for neither, -1 for the older one."""
    said = [preference for preference in preferences if preference is not None]
    wins, losses = said.count(1.0), said.count(-1.0)
    ties = len(said) - wins - losses
    if not said:
        return WinRate(0, 0, 0, None, None, None)
    rate = (wins + ties / 2) / len(said)
    low, high = wilson_interval(rate, len(said))
    return WinRate(wins, ties, losses, rate, low, high)


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
