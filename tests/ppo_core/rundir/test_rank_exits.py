"""What the exits of several ranks say, and which fault is the cause."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ppo_core.rundir import (
    RankExit,
    RankFault,
    SegmentDir,
    SegmentStart,
    create_segment,
    describe_exits,
    echoes_a_rank,
    end_of_log,
    find_fault,
    first_lost,
    write_atomically,
)

# What a rank leaves with whose connection to the others broke.
BROKEN = 1


@pytest.fixture
def segment(tmp_path: Path) -> SegmentDir:
    return create_segment(tmp_path, SegmentStart("r", 1, {}))


def exits(*statuses: int | None) -> list[RankExit]:
    return [RankExit(rank, status) for rank, status in enumerate(statuses)]


def leave_fault(segment: SegmentDir, rank: int, **more: Any) -> None:
    fault = {"code": "reward", "message": "no scores", "hint": "look", "traceback": "T", "exit_code": 65, **more}
    write_atomically(segment.fault(1, rank), json.dumps(fault))


@pytest.mark.parametrize(
    ("left", "words"),
    [
        (exits(-9), "signal 9"),
        (exits(3), "exit code 3"),
        (exits(BROKEN, -9, BROKEN), "rank 1: signal 9; ranks 0, 2: exit code 1"),
        (exits(None, 70), "rank 1: exit code 70; rank 0: still running"),
        (
            [RankExit(0, BROKEN), RankExit(1, -9, ended=True, stopped=True), RankExit(2, -9, ended=True)],
            "rank 0: exit code 1; rank 1: signal 9, ended while it stood stopped; "
            "rank 2: signal 9, ended with the others",
        ),
    ],
)
def test_exits_are_told_with_the_likely_cause_first(left: list[RankExit], words: str) -> None:
    assert describe_exits(left) == words


def test_the_log_that_says_most_is_the_likely_causes() -> None:
    assert first_lost(exits(BROKEN, 70)) == 0
    assert first_lost(exits(BROKEN, BROKEN, -9)) == 2
    assert first_lost([RankExit(0, -9, ended=True), RankExit(1, BROKEN)]) == 1


def test_any_exit_of_rank_0_breaks_the_group_and_of_others_only_one_not_at_rest() -> None:
    assert [RankExit(0, status).breaks_group for status in (None, 0, 11, 1, -9)] == [False, True, True, True, True]
    assert [RankExit(1, status).breaks_group for status in (None, 0, 11, 1, -9)] == [False, False, False, True, True]
    assert not RankExit(1, -9, ended=True).breaks_group


def test_a_rank_killed_here_is_not_called_killed_from_outside() -> None:
    assert RankExit(1, -9).killed
    assert not RankExit(1, -9, ended=True).killed
    assert not RankExit(1, -15).killed


def test_the_fault_that_a_rank_left_is_found_whatever_the_exits(segment: SegmentDir) -> None:
    leave_fault(segment, 1)
    expected = RankFault(1, "reward", "no scores", "look", segment.log(1, 1))
    assert find_fault(segment, 1, exits(BROKEN, 65)) == expected
    assert str(expected) == "rank 1: no scores"
    assert find_fault(segment, 1, exits(-6, 65)) == expected
    assert find_fault(segment, 2, exits(BROKEN, -9)) is None


def test_the_oldest_of_several_faults_is_the_cause(segment: SegmentDir) -> None:
    for rank in (1, 2):
        leave_fault(segment, rank, message=f"of {rank}")
    os.utime(segment.fault(1, 2), ns=(1, 1))
    fault = find_fault(segment, 1, exits(BROKEN, 65, 65))
    assert fault is not None
    assert fault.message == "of 2"


@pytest.mark.parametrize("left", ["", "[]", "{", '{"exit_code": 70}', '{"exit_code": []}', "[" * 100_000])
def test_a_damaged_fault_file_leaves_the_word_to_the_exit_code(segment: SegmentDir, left: str) -> None:
    segment.fault(1, 1).write_text(left)
    segment.log(1, 1).write_text("first\nlast words\n")
    fault = find_fault(segment, 1, exits(BROKEN, 70))
    assert fault is not None
    assert (fault.rank, fault.code) == (1, "trainer_fault")
    assert fault.message == "exit code 70; the end of its log:\nfirst\nlast words"
    assert find_fault(segment, 1, exits(BROKEN, -9)) is None


def test_a_fault_that_is_only_a_lost_connection_is_none(segment: SegmentDir) -> None:
    leave_fault(segment, 2, exit_code=BROKEN)
    assert find_fault(segment, 1, exits(BROKEN, -9, BROKEN)) is None


@pytest.mark.parametrize(
    "left",
    [
        exits(70),  # rank 0 has the journal to say it in; where it could not, another attempt may
        exits(70, BROKEN),
        exits(BROKEN, BROKEN),
        exits(BROKEN, 70, -9),  # the kill came first: code 70 is what it looked like to rank 1
        [RankExit(0, BROKEN), RankExit(1, 70, ended=True)],
    ],
)
def test_exits_that_are_no_fault_of_a_ranks_own(segment: SegmentDir, left: list[RankExit]) -> None:
    assert find_fault(segment, 1, left) is None


OWN = RankFault(1, "data", "row 7 is empty", None, Path("log"))


@pytest.mark.parametrize(
    ("code", "error", "other", "fault", "echo"),
    [
        (70, "unexpected", RankExit(1, -9), None, True),
        (70, "unexpected", RankExit(1, -9, ended=True), None, False),
        (70, "unexpected", RankExit(1, -6), None, False),
        (70, "unexpected", RankExit(1, 65), OWN, True),
        (70, "unexpected", RankExit(1, 70), replace(OWN, message="connection closed"), False),
        (70, "rollout", RankExit(1, -9), None, False),
        (65, "reward", RankExit(1, -9), None, False),
        (0, None, RankExit(1, -9), None, False),
    ],
)
def test_a_fault_of_rank_0_without_a_name_is_an_echo_where_another_was_killed_or_failed_of_something_else(
    code: int, error: str | None, other: RankExit, fault: RankFault | None, echo: bool
) -> None:
    end = {"code": code, "error": error and {"code": error, "message": "connection closed"}}
    assert echoes_a_rank(end, [RankExit(0, code), other], fault) is echo


def test_a_single_ranks_fault_is_no_echo_even_if_it_was_killed_while_leaving() -> None:
    end = {"code": 70, "error": {"code": "unexpected", "message": "m"}}
    assert not echoes_a_rank(end, [RankExit(0, -9)], None)


def test_the_end_of_a_log_is_its_last_lines_however_long_it_is(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * 100_000 + b"\n" + b"".join(b"line %d \xff\n" % number for number in range(40)))
    lines = end_of_log(log).splitlines()
    assert (len(lines), lines[-1]) == (15, "line 39 \ufffd")
    assert end_of_log(tmp_path / "none") == ""
