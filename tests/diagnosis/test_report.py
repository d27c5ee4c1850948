"""What a run told, and the tables made of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.diagnosis import detection
from tests.diagnosis.detection import FAULTS, HEALTHY, Told, keep, read_seen, told_by, unseen
from tests.diagnosis.report import table
from tests.ppo_core.diagnostics import planted

FAULT = next(fault for fault in FAULTS if fault.fault == "length_hacking")


def told(seed: int, *raised: tuple[str, int], kind: str = "length_hacking") -> Told:
    return Told(kind, seed, "succeeded", 60, 1, raised)


@pytest.mark.parametrize(
    ("raised", "found"),
    [
        ([("band:kl/ref_sequence", 9), ("story:length_hacking", 20), ("story:kl_runaway", 30)], True),
        ([("story:kl_runaway", 12), ("story:length_hacking", 20)], False),
        ([("story:length_hacking", 41)], False),
        ([("band:response/length_mean", 20)], False),
    ],
    ids=["first", "second", "late", "none"],
)
def test_only_the_first_story_counts_and_only_in_time(raised: list[tuple[str, int]], found: bool) -> None:
    assert told(1, *raised).finds(FAULT) is found


def test_a_journal_is_read_for_what_was_raised() -> None:
    events = [
        SimpleNamespace(type="gate", iteration=5, payload={}),
        SimpleNamespace(type="metrics", iteration=7, payload={}),
        SimpleNamespace(type="alert", iteration=7, payload={"rule": "story:length_hacking", "status": "raised"}),
        SimpleNamespace(type="alert", iteration=9, payload={"rule": "story:length_hacking", "status": "cleared"}),
    ]
    assert told_by("length_hacking", 2, "succeeded", events) == Told(
        "length_hacking", 2, "succeeded", 7, 1, (("story:length_hacking", 7),)
    )


def test_what_is_kept_is_not_played_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [told(1, ("story:length_hacking", 20)), told(3)]
    monkeypatch.setenv(detection.KEPT_IN, str(tmp_path / "seen.jsonl"))
    for each in seen:
        keep(each)
    assert [each for each, _ in read_seen(tmp_path / "seen.jsonl")] == seen
    assert unseen("length_hacking") == [2, 4, 5]
    assert unseen("reviews") == [1, 2, 3, 4, 5]


def test_the_table_counts_seeds_and_names_what_came_first() -> None:
    runs = [told(1, ("story:length_hacking", 20)), told(2, ("story:kl_runaway", 12)), told(3)]
    runs.append(told(1, ("band:policy/kl", 4), kind="reviews"))
    rows = table([(each, "2026-11-30") for each in runs]).splitlines()
    (row,) = (row for row in rows if "`length_hacking`" in row)
    assert "| 1 of 3 | 40 | 20 | `kl_runaway` 1, `none` 1 | 2026-11-30 |" in row
    assert any(row.startswith("| reviews:") and "| 1 | 60 | none | 1 (0) | `policy/kl` 1 |" in row for row in rows)
    assert sum("not yet seen" in row for row in rows) == len(FAULTS) - 1 + len(HEALTHY) - 1


def test_every_fault_of_the_table_can_be_planted() -> None:
    assert {fault.fault for fault in FAULTS} == set(planted.FAULTS) - {"healthy"}
