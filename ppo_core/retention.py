"""Which checkpoints may go, and why each of the others stays. A door, importable without torch.

Pure functions over records: nothing here touches a file. Whoever deletes takes `removable`, and a preview shows
`decisions` whole. One rule stands above the settings: nothing goes before a newer checkpoint has been verified, so
that a run never stands without a good one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

# A gate was held where this metric was told, be it null.
GATE_METRIC = "judge/win_rate"


class RetentionRules(Protocol):
    """What `checkpoints` of a run spec says about keeping."""

    @property
    def keep_last(self) -> int: ...
    @property
    def keep_every(self) -> int | None: ...
    @property
    def keep_best(self) -> int: ...


@dataclass(frozen=True)
class Kept:
    """A checkpoint that exists.

    `verified` is True once its files were compared with its manifest, False for a damaged one, None while nobody has
    looked. `protected_reason` says who else needs it ("segment 3 starts from it"), None if nobody does.
    """

    id: str
    segment: int
    iteration: int
    verified: bool | None = None
    pinned: bool = False
    judge_score: float | None = None
    protected_reason: str | None = None


@dataclass(frozen=True)
class Stretch:
    """Iterations `first` to `last` of a segment, both included, that belong to the run's present history."""

    segment: int
    first: int
    last: int


@dataclass(frozen=True)
class History:
    """What of a run's past asks for a checkpoint to go back to.

    `line` is what survived its roll backs; `gates` are iterations at which a judge gate was held there, `onsets` those
    with which an alert that is still open began. `left` are segments that a roll back left: where they end is where
    another roll back goes to undo it.
    """

    line: tuple[Stretch, ...] = ()
    gates: tuple[int, ...] = ()
    onsets: tuple[int, ...] = ()
    left: tuple[int, ...] = ()


NOTHING_HAPPENED = History()


@dataclass(frozen=True)
class OnlyWhatIsNeeded:
    """The rules of a person who deletes: none of the spec's. What is needed elsewhere stays all the same."""

    keep_last: int = 0
    keep_every: int | None = None
    keep_best: int = 0


@dataclass(frozen=True)
class Decision:
    """What becomes of one checkpoint: `stays` with the reasons for it, or goes with the reason for that."""

    checkpoint: Kept
    stays: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Removal:
    """One checkpoint that may go."""

    id: str
    segment: int
    iteration: int
    reason: str


def decisions(
    checkpoints: Sequence[Kept], rules: RetentionRules, history: History = NOTHING_HAPPENED
) -> list[Decision]:
    """What becomes of each checkpoint and why, newest first; newest is by segment, then iteration, as numbers.

    Damaged ones (`verified` False) count for none of the rules: they neither fill a place among the last or the best,
    nor protect what is older.

    The last two gates have theirs: one is the gate that may just have tripped, the other the one to go back to.

    Raises:
        ValueError: two records have one id.
    """
    newest_first = sorted(checkpoints, key=_age, reverse=True)
    if len({checkpoint.id for checkpoint in newest_first}) < len(newest_first):
        raise ValueError("two checkpoints have one id")
    sound = [checkpoint for checkpoint in newest_first if checkpoint.verified is not False]
    newest_good = next((checkpoint for checkpoint in newest_first if checkpoint.verified), None)
    by_rules = _by_rules(sound, rules)
    by_history = _by_history(sound, history)
    result = []
    for checkpoint in newest_first:
        reasons = ["the newest verified checkpoint"] if checkpoint is newest_good else []
        reasons += by_rules.get(checkpoint.id, ())
        if checkpoint.pinned:
            reasons.append("pinned")
        if checkpoint.protected_reason is not None:
            reasons.append(checkpoint.protected_reason)
        reasons += by_history.get(checkpoint.id, ())
        if not reasons and (newest_good is None or _age(newest_good) <= _age(checkpoint)):
            reasons.append("no newer checkpoint has been verified yet")
        stays = bool(reasons)
        if not stays:
            why = "damaged, and" if checkpoint.verified is False else "no rule keeps it;"
            reasons.append(f"{why} a newer one is verified")
        result.append(Decision(checkpoint, stays, tuple(reasons)))
    return result


def _by_rules(sound: Sequence[Kept], rules: RetentionRules) -> dict[str, list[str]]:
    """What the settings keep, and why: id to reasons. `sound` has the newest first."""
    reasons: dict[str, list[str]] = {}
    if rules.keep_last < 0:
        _keep(reasons, sound, "keep_last: all stay")
    else:
        _keep(reasons, sound[: rules.keep_last], f"one of the last {rules.keep_last}")
    for checkpoint in sound:
        if rules.keep_every and checkpoint.iteration % rules.keep_every == 0:
            why = f"iteration {checkpoint.iteration} is a multiple of keep_every {rules.keep_every}"
            _keep(reasons, [checkpoint], why)
    for checkpoint in _best(sound, rules.keep_best):
        why = f"judge's score {checkpoint.judge_score:.4g} is among the best {rules.keep_best}"
        _keep(reasons, [checkpoint], why)
    return reasons


def _by_history(sound: Sequence[Kept], history: History) -> dict[str, list[str]]:
    """What the run's past keeps to go back to, and why: id to reasons. `sound` has the newest first."""
    reasons: dict[str, list[str]] = {}
    on_line = [checkpoint for checkpoint in sound if _is_on(history.line, checkpoint)]
    for gate in sorted(set(history.gates))[-2:]:
        _keep(reasons, _newest_until(on_line, gate), f"the newest at the gate of iteration {gate}")
    for onset in sorted(set(history.onsets)):
        why = f"the newest before the alert that began at iteration {onset}"
        _keep(reasons, _newest_until(on_line, onset - 1), why)
    for segment in sorted(set(history.left)):
        of_it = [c for c in sound if c.segment == segment and c not in on_line]
        _keep(reasons, _newest_until(of_it, None), f"the end of segment {segment}, which a roll back left")
    return reasons


def _keep(reasons: dict[str, list[str]], checkpoints: Sequence[Kept], why: str) -> None:
    for checkpoint in checkpoints:
        reasons.setdefault(checkpoint.id, []).append(why)


def removable(checkpoints: Sequence[Kept], rules: RetentionRules, history: History = NOTHING_HAPPENED) -> list[Removal]:
    """The checkpoints that may go, oldest first, each with the reason."""
    return [
        Removal(decision.checkpoint.id, decision.checkpoint.segment, decision.checkpoint.iteration, decision.reasons[0])
        for decision in reversed(decisions(checkpoints, rules, history))
        if not decision.stays
    ]


def _age(checkpoint: Kept) -> tuple[int, int, str]:
    return checkpoint.segment, checkpoint.iteration, checkpoint.id


def _is_on(line: Sequence[Stretch], checkpoint: Kept) -> bool:
    return any(
        checkpoint.segment == stretch.segment and stretch.first <= checkpoint.iteration <= stretch.last
        for stretch in line
    )


def _newest_until(newest_first: Sequence[Kept], iteration: int | None) -> list[Kept]:
    """The newest verified one up to `iteration`, and those after it that nobody has looked at: they may be damaged.

    With `iteration` None, the newest of all.
    """
    found = []
    for checkpoint in newest_first:
        if iteration is None or checkpoint.iteration <= iteration:
            found.append(checkpoint)
            if checkpoint.verified:
                break
    return found


def _best(newest_first: Sequence[Kept], number: int) -> list[Kept]:
    """The `number` highest judge's scores; of equal ones the newer. No score, or NaN, is never a best."""
    scored = [(c.judge_score, c) for c in newest_first if c.judge_score is not None and not math.isnan(c.judge_score)]
    return [checkpoint for _, checkpoint in sorted(scored, key=lambda pair: pair[0], reverse=True)[:number]]
