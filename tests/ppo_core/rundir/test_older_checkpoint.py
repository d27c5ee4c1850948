"""The checkpoint to go back to: the newest from before an iteration, along the line that survived roll backs."""

from __future__ import annotations

from pathlib import Path

from ppo_core.rundir import SegmentDir, SegmentStart, checkpoint_before, create_segment, new_checkpoint


def made(run_dir: Path, number: int, iterations: list[int], start: Path | None = None) -> SegmentDir:
    segment = create_segment(run_dir, SegmentStart("run", number, {}, str(start) if start else None))
    for iteration in iterations:
        with new_checkpoint(segment.checkpoint(iteration)) as folder:
            (folder / "state.json").write_text("{}")
    return segment


def test_it_is_the_newest_before_the_iteration(tmp_path: Path) -> None:
    segment = made(tmp_path, 1, [20, 40, 60])
    assert checkpoint_before(segment, 61) == ("1:60", 60)
    assert checkpoint_before(segment, 60) == ("1:40", 40)
    assert checkpoint_before(segment, 20) is None


def test_a_roll_back_goes_on_from_its_parents_line_and_not_from_what_it_left(tmp_path: Path) -> None:
    first = made(tmp_path, 1, [20, 40, 60])
    second = made(tmp_path, 2, [], first.checkpoint(40))
    third = made(tmp_path, 3, [50], second.checkpoint(40))
    assert checkpoint_before(second, 100) == ("1:40", 40)
    assert checkpoint_before(second, 40) == ("1:20", 20)
    assert checkpoint_before(third, 55) == ("3:50", 50)


def test_a_fork_knows_no_checkpoint_of_the_other_run(tmp_path: Path) -> None:
    other = made(tmp_path / "other", 1, [20])
    assert checkpoint_before(made(tmp_path / "fork", 1, [], other.checkpoint(20)), 100) is None
