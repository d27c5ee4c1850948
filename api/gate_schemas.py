"""What travels over REST about judge gates."""

from __future__ import annotations

from pydantic import Field

from api.schemas import Message, Time


class GateWins(Message):
    """How the judge found a gate's answers against earlier ones; a tie counts half."""

    wins: int
    ties: int
    losses: int
    rate: float | None = Field(description="(wins + ties / 2) / pairs; null without a pair.")
    low: float | None = Field(description="Lower end of the 95 % interval of `rate` (Wilson).")
    high: float | None
    asked: int | None = Field(None, description="Pairs that a judge by comparison was asked about; null: it scores.")
    swayed: int | None = Field(None, description="Of these, decided by their place alone, which makes them ties.")
    unreadable: int | None = Field(None, description="Of these, answered with none of the words asked for.")


class GateRise(Message):
    """How far the training reward rose between the answers of two gates, prompt by prompt."""

    mean: float | None
    standard_error: float | None


class Gate(Message):
    """A judge gate: the evidence, whether it tripped, and why in words."""

    segment: int
    iteration: int
    time: Time
    active: bool = Field(description="False: a roll back has left it behind.")
    tripped: bool
    explanation: str
    against_last: GateWins
    against_start: GateWins
    rise: GateRise
    num_suspect: int = Field(description="Gates in a row whose score rose while at most half was won.")
