"""Where a run starts again: in its segment where the journal ends at a checkpoint, else in a new one."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo_core.errors import RunDirectoryError
from ppo_core.rundir import (
    JournalWriter,
    SegmentDir,
    SegmentStart,
    create_segment,
    next_start,
)
from tests.ppo_core.rundir.segment_files import START, make_checkpoint


def journal_of(segment: SegmentDir, iterations: range) -> None:
    writer = JournalWriter(segment.journal)
    for iteration in iterations:
        writer.append("metrics", iteration, {})
    writer.close()


def test_a_restart_at_the_journals_end_stays_in_its_segment(segment: SegmentDir) -> None:
    assert next_start(segment.path.parent) == START
    journal_of(segment, range(11))
    make_checkpoint(segment, 9)
    make_checkpoint(segment, 10)
    assert next_start(segment.path.parent) == START


def test_a_restart_behind_the_journals_end_opens_a_new_segment(segment: SegmentDir) -> None:
    journal_of(segment, range(13))
    make_checkpoint(segment, 9)
    target = make_checkpoint(segment, 10)
    start = next_start(segment.path.parent)
    assert (start.segment, start.checkpoint, start.spec) == (2, str(target), START.spec)


def test_a_restart_before_any_checkpoint_begins_again_in_a_new_segment(segment: SegmentDir) -> None:
    journal_of(segment, range(3))
    start = next_start(segment.path.parent)
    assert (start.segment, start.checkpoint) == (2, None)


def test_a_restart_of_a_segment_that_began_from_a_checkpoint_goes_back_to_that(segment: SegmentDir) -> None:
    target = make_checkpoint(segment, 10)
    second = create_segment(segment.path.parent, SegmentStart("r-1", 2, {}, str(target)))
    assert next_start(segment.path.parent).segment == 2
    journal_of(second, range(11, 13))
    start = next_start(segment.path.parent)
    assert (start.segment, start.checkpoint) == (3, str(target))


def test_a_run_without_a_segment_has_nothing_to_restart(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="no segment"):
        next_start(tmp_path)
