"""What the example's run did, read from the api's events, and whether that is the story which README.md tells.

Pure functions of what the platform tells of a run; the platform itself is in `__main__`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from examples.reviews.figures import Promise
from ppo_core.diagnostics.bands import KL_FLOOR

RULE = "story:length_hacking"
# Iterations of which a mean is taken: single ones are noisy.
AROUND = 5
KL_WITHIN = 40


@dataclass
class Part:
    """One segment of the run, as far as it went: metrics by iteration, and where the story was raised."""

    metrics: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    raised_at: int | None = None

    @property
    def last(self) -> int:
        return max(self.metrics)

    def series(self, name: str) -> list[tuple[int, float]]:
        """Iterations that have this metric, in order, with its values."""
        return [(at, float(row[name])) for at, row in sorted(self.metrics.items()) if row.get(name) is not None]

    def mean(self, name: str, last: int | None = None, num: int = AROUND) -> float:
        """Over the `num` iterations up to `last`, or the part's end."""
        values = [value for at, value in self.series(name) if last is None or at <= last]
        return fmean(values[-num:])

    def latest(self, name: str) -> float:
        return self.series(name)[-1][1]


def parts(events: Iterable[Mapping[str, Any]]) -> dict[int, Part]:
    """By number of the segment what a run's events tell of it."""
    found: dict[int, Part] = {}
    for event in events:
        if event["type"] not in ("metrics", "alert"):
            continue
        part = found.setdefault(event["segment"], Part())
        if event["type"] == "metrics":
            part.metrics[event["iteration"]] = event["payload"]
        elif event["payload"]["rule"] == RULE and event["payload"]["status"] == "raised":
            part.raised_at = part.raised_at or event["iteration"]
    return found


def going_wrong(part: Part, start: int) -> list[Promise]:
    """The first part: the score climbs by length, and the story is told in time.

    Args:
        start: up to which iteration the policy was not trained.
    """
    score = "reward/score_mean"
    before = part.mean(score, start)
    tens = [part.mean(score, at, 10) for at in range(start + 10, part.last + 1, 10)]
    rising = all(later > earlier for earlier, later in zip([before, *tens], tens, strict=False))
    longer = part.mean("response/length_mean") / part.mean("response/length_mean", start)
    ended = part.mean("response/eos_rate") - part.mean("response/eos_rate", start)
    kl = fastest_growth(part.series("kl/ref_sequence"))
    gain = part.mean(score) - before
    told = None if part.raised_at is None else (part.mean(score, part.raised_at) - before) / gain
    means = ", ".join(f"{mean:.2f}" for mean in [before, *tens])
    return [
        Promise("score, mean of each ten iterations", "rises", gain, rising, means),
        Promise("length, share of the start's", "≥ 1.8", longer, longer >= 1.8, f"{longer:.2f}"),
        Promise("EOS rate, change", "≤ -0.15", ended, ended <= -0.15, f"{ended:+.2f}"),
        Promise(f"KL, growth within {KL_WITHIN} iterations", "> 2×", kl, kl > 2, f"{kl:.1f}×"),
        Promise(
            "story told when the score had made",
            "< 50 % of its gain",
            told if told is not None else 1.0,
            told is not None and told < 0.5,
            "not told" if told is None else f"{told:.0%}, at iteration {part.raised_at}",
        ),
    ]


def going_right(part: Part, first: Part, start: int) -> list[Promise]:
    """The part after the roll back: what the judge thinks, and whether answers are as they were."""
    return [judged_better(part), *as_before(part, first, start)]


def staying_well(part: Part, start: int) -> list[Promise]:
    """A run that nobody has to stop."""
    told = "not told" if part.raised_at is None else f"at iteration {part.raised_at}"
    quiet = Promise("story", "not told", 0.0, part.raised_at is None, told)
    return [quiet, *going_right(part, part, start)]


def wanting_length(part: Part, start: int) -> list[Promise]:
    """The twin: answers grow as much, and a judge who wants that is content."""
    longer = part.mean("response/length_mean") / part.mean("response/length_mean", start)
    return [
        Promise("length, share of the start's", "≥ 1.8", longer, longer >= 1.8, f"{longer:.2f}"),
        judged_better(part),
    ]


def judged_better(part: Part) -> Promise:
    """Whether the last gate's interval against the starting policy lies above one half."""
    name = "judge/win_rate_vs_start"
    rate, low, high = (part.latest(name + end) for end in ("", "_low", "_high"))
    shown = f"{rate:.2f} ({low:.2f} to {high:.2f})"
    return Promise("judge's win rate against the start", "interval > 0.5", low, low > 0.5, shown)


def as_before(part: Part, first: Part, start: int) -> list[Promise]:
    """Whether length and EOS rate are in the bands of the registry around those of the start."""
    longer = part.mean("response/length_mean") / first.mean("response/length_mean", start)
    ended = part.mean("response/eos_rate") - first.mean("response/eos_rate", start)
    return [
        Promise("length, share of the start's", "≤ 1.5", longer, longer <= 1.5, f"{longer:.2f}"),
        Promise("EOS rate, change", "≥ -0.05", ended, ended >= -0.05, f"{ended:+.2f}"),
    ]


def fastest_growth(series: Sequence[tuple[int, float]]) -> float:
    """By which factor KL grew most within `KL_WITHIN` iterations; what is below a few nats counts as those few."""
    return max(
        later / max(earlier, KL_FLOOR)
        for number, (then, earlier) in enumerate(series)
        for now, later in series[number:]
        if now - then <= KL_WITHIN
    )
