"""A run's line goes from its newest segment back to the first, each up to where the next one starts."""

from __future__ import annotations

from pathlib import Path

from ppo_core.rundir import SegmentDir, SegmentStart, create_segment, line_to


def made(run_dir: Path, number: int, checkpoint: Path | None = None) -> SegmentDir:
    start = SegmentStart(run_dir.name, number, {}, None if checkpoint is None else str(checkpoint))
    return create_segment(run_dir, start)


def told(segment: SegmentDir) -> list[tuple[int, int, int | None]]:
    return [(piece.segment.number, piece.start, piece.last) for piece in line_to(segment)]


def test_a_line_leaves_out_what_roll_backs_left(tmp_path: Path) -> None:
    first = made(tmp_path / "run", 1)
    second = made(tmp_path / "run", 2, first.checkpoint(40))
    assert told(second) == [(2, 40, None), (1, 0, 40)]
    assert told(made(tmp_path / "run", 3, second.checkpoint(50))) == [(3, 50, None), (2, 40, 50), (1, 0, 40)]
    assert told(made(tmp_path / "run", 4, first.checkpoint(20))) == [(4, 20, None), (1, 0, 20)]


def test_a_segment_saved_where_it_starts_gives_its_parent_no_more_than_that(tmp_path: Path) -> None:
    first = made(tmp_path / "run", 1)
    second = made(tmp_path / "run", 2, first.checkpoint(40))
    assert told(made(tmp_path / "run", 3, second.checkpoint(40))) == [(3, 40, None), (2, 40, 40), (1, 0, 40)]


def test_a_forks_line_ends_with_the_fork(tmp_path: Path) -> None:
    other = made(tmp_path / "other", 1)
    fork = made(tmp_path / "fork", 1, other.checkpoint(20))
    assert told(made(tmp_path / "fork", 2, fork.checkpoint(30))) == [(2, 30, None), (1, 20, 30)]


def test_a_folder_of_runs_that_was_moved_keeps_their_lines(tmp_path: Path) -> None:
    first = made(tmp_path / "here" / "run", 1)
    made(tmp_path / "here" / "run", 2, first.checkpoint(40))
    (tmp_path / "here").rename(tmp_path / "there")
    assert told(SegmentDir(tmp_path / "there" / "run" / "segment-0002")) == [(2, 40, None), (1, 0, 40)]
