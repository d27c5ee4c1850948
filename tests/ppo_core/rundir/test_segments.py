"""Segments: made once, whole or not at all, in order; files are replaced, never half written."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ppo_core.errors import RunDirectoryError
from ppo_core.rundir import (
    SegmentDir,
    SegmentStart,
    create_segment,
    is_unused,
    segments,
    write_atomically,
)
from tests.ppo_core.rundir.segment_files import START, run_script


def test_a_segment_is_made_once_and_read_back(segment: SegmentDir) -> None:
    assert segment.read_start() == START
    assert create_segment(segment.path.parent, START) == segment
    assert {child.name for child in segment.path.iterdir()} == {
        "spec.json",
        "samples",
        "logs",
        "control",
        "checkpoints",
    }


def test_a_segment_with_another_spec_is_never_rewritten(segment: SegmentDir) -> None:
    with pytest.raises(RunDirectoryError, match="never rewritten"):
        create_segment(segment.path.parent, SegmentStart("r-1", 1, {"name": "other"}))
    assert segment.read_start() == START


def test_a_segment_that_can_be_listed_can_be_read(tmp_path: Path) -> None:
    """Somebody who looks while segments are made, over and over, never meets one without its spec."""
    maker = """
        import sys
        from pathlib import Path
        from ppo_core.rundir import SegmentStart, create_segment
        for number in range(1, 101):
            create_segment(Path(sys.argv[1]), SegmentStart("r", number, {}))
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(maker), str(tmp_path)])
    numbers: list[int] = []
    while process.poll() is None:
        numbers = [segment.read_start().segment for segment in segments(tmp_path)]
        assert numbers == sorted(numbers)
    assert process.returncode == 0
    assert [segment.read_start().segment for segment in segments(tmp_path)] == list(range(1, 101))


def test_a_maker_killed_half_way_leaves_no_segment_and_does_no_harm(tmp_path: Path) -> None:
    killed = """
        import os, signal, sys
        from pathlib import Path
        from ppo_core.rundir import SegmentStart, create_segment, segments
        sys.modules["ppo_core.rundir.segments"].write_atomically = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        create_segment(Path(sys.argv[1]), SegmentStart("r-1", 1, {}))
    """
    assert run_script(killed, tmp_path).returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) != []
    assert segments(tmp_path) == []
    assert is_unused(tmp_path)
    create_segment(tmp_path, START)
    assert [child.name for child in tmp_path.iterdir()] == ["segment-0001"]
    assert not is_unused(tmp_path)


def test_two_makers_at_once_agree_or_the_second_is_refused(tmp_path: Path) -> None:
    maker = """
        import sys
        from pathlib import Path
        from ppo_core.rundir import SegmentStart, create_segment
        for number in range(1, 41):
            create_segment(Path(sys.argv[1]), SegmentStart("r-1", number, {}))
    """
    command = [sys.executable, "-c", textwrap.dedent(maker), str(tmp_path)]
    makers = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(60) for process in makers] == [0, 0]
    assert sorted(child.name for child in tmp_path.iterdir()) == [f"segment-{number:04d}" for number in range(1, 41)]
    with pytest.raises(RunDirectoryError, match="never rewritten"):
        create_segment(tmp_path, SegmentStart("other", 1, {}))


def test_segments_are_ordered_as_numbers(tmp_path: Path) -> None:
    for number in (100, 9, 10000, 10):
        create_segment(tmp_path, SegmentStart("r", number, {}))
    (tmp_path / "segment-x").mkdir()
    (tmp_path / "segment-12").mkdir()
    assert [path.path.name for path in segments(tmp_path)] == [
        "segment-0009",
        "segment-0010",
        "segment-0100",
        "segment-10000",
    ]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"run_id": "r"}', "\x00", "[" * 100_000])
def test_a_damaged_spec_file_is_named(segment: SegmentDir, text: str) -> None:
    segment.spec.write_text(text, encoding="utf-8")
    with pytest.raises(RunDirectoryError, match=r"spec\.json cannot be read"):
        segment.read_start()


def test_a_failed_write_leaves_the_old_file_and_nothing_aside(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text(encoding="utf-8") == "old"
    assert [child.name for child in tmp_path.iterdir()] == ["x.json"]
