"""A checkpoint is whole or there is none: writes that fail, changed bytes, damaged manifests, removal."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from ppo_core.errors import CheckpointError
from ppo_core.rundir import (
    SegmentDir,
    checkpoint_bytes,
    checkpoint_iteration,
    checkpoints,
    new_checkpoint,
    read_manifest,
    remove_checkpoint,
    remove_leftovers,
    verify_checkpoint,
)
from tests.ppo_core.rundir.segment_files import CONTENTS, make_checkpoint


def test_a_checkpoint_is_whole_and_verifies(segment: SegmentDir) -> None:
    target = make_checkpoint(segment, 5)
    verify_checkpoint(target)
    assert set(read_manifest(target)) == set(CONTENTS)
    assert checkpoint_bytes(target) == sum(map(len, CONTENTS.values()))
    assert checkpoints(segment) == [target]


def test_checkpoints_are_ordered_as_numbers(segment: SegmentDir) -> None:
    for iteration in (100, 9, 10, 1_000_000, 99_999_999):
        make_checkpoint(segment, iteration)
    found = [checkpoint_iteration(path) for path in checkpoints(segment)]
    assert found == [9, 10, 100, 1_000_000, 99_999_999]


@pytest.mark.parametrize("name", ["iter-5", "iter-00000x", ".iter-000005.1.tmp", "iter-000005.removed", "xiter-000005"])
def test_other_names_are_no_checkpoint(segment: SegmentDir, name: str) -> None:
    make_checkpoint(segment, 5).rename(segment.checkpoints / name)
    assert checkpoints(segment) == []


def test_a_failure_while_writing_leaves_none(segment: SegmentDir) -> None:
    def fail() -> None:
        with new_checkpoint(segment.checkpoint(5)) as folder:
            (folder / "state.json").write_bytes(b"half")
            raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        fail()
    assert list(segment.checkpoints.iterdir()) == []


def test_a_kill_while_writing_leaves_none(segment: SegmentDir) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time, pathlib\n"
            "from ppo_core.rundir import new_checkpoint\n"
            "with new_checkpoint(pathlib.Path(sys.argv[1])) as folder:\n"
            "    (folder / 'state.json').write_bytes(b'half')\n"
            "    print('half', flush=True)\n"
            "    time.sleep(60)\n",
            str(segment.checkpoint(5)),
        ],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"half\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert checkpoints(segment) == []
    assert len(list(segment.checkpoints.iterdir())) == 1
    remove_leftovers(segment)
    assert list(segment.checkpoints.iterdir()) == []


def test_a_checkpoint_is_never_overwritten(segment: SegmentDir) -> None:
    target = make_checkpoint(segment, 5)
    with pytest.raises(CheckpointError, match="never overwritten"):
        make_checkpoint(segment, 5)
    verify_checkpoint(target)
    assert list(segment.checkpoints.iterdir()) == [target]


@pytest.mark.parametrize("name", CONTENTS)
def test_every_flipped_bit_is_found_and_its_file_named(segment: SegmentDir, name: str) -> None:
    path = make_checkpoint(segment, 5) / name
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError, match=f"{path} has SHA-256"):
            verify_checkpoint(segment.checkpoint(5))


@pytest.mark.parametrize("name", CONTENTS)
def test_a_short_long_or_missing_file_is_found_and_named(segment: SegmentDir, name: str) -> None:
    target = make_checkpoint(segment, 5)
    path = target / name
    for content in (CONTENTS[name][:-1], CONTENTS[name] + b"\0", b""):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{path} has {len(content)} bytes"):
            verify_checkpoint(target)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{path} is missing"):
        verify_checkpoint(target)


def test_a_flipped_bit_of_the_manifest_never_passes_for_other_files(segment: SegmentDir) -> None:
    """Each either fails by name, or leaves the list of files as it was (a bit of white space or of `format`)."""
    target = make_checkpoint(segment, 5)
    path = target / "manifest.json"
    good, content = read_manifest(target), path.read_bytes()
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        try:
            verify_checkpoint(target)
        except CheckpointError:
            continue
        assert read_manifest(target) == good


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"files": null}',
        '{"files": []}',
        '{"files": {}}',
        '{"files": {"a": 1}}',
        '{"files": {"a": {"sha256": "x"}}}',
        '{"files": {"a": {"sha256": "x", "bytes": "1"}}}',
        '{"files": {"../a": {"sha256": "x", "bytes": 1}}}',
        '{"files": {"/etc/passwd": {"sha256": "x", "bytes": 1}}}',
        "[" * 100_000,
        "\x00",
    ],
    ids=range(13),
)
def test_a_damaged_manifest_is_no_whole_checkpoint(segment: SegmentDir, text: str) -> None:
    target = make_checkpoint(segment, 5)
    (target / "manifest.json").write_text(text, encoding="utf-8")
    for call in (verify_checkpoint, read_manifest, checkpoint_bytes):
        with pytest.raises(CheckpointError, match="no whole checkpoint"):
            call(target)


def test_a_missing_manifest_means_no_checkpoint(segment: SegmentDir) -> None:
    target = make_checkpoint(segment, 5)
    (target / "manifest.json").unlink()
    assert checkpoints(segment) == []
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        verify_checkpoint(target)


def test_a_removed_checkpoint_is_gone_and_a_half_removed_one_is_not_seen(segment: SegmentDir) -> None:
    target = make_checkpoint(segment, 5)
    remove_checkpoint(target)
    assert list(segment.checkpoints.iterdir()) == []
    make_checkpoint(segment, 5).rename(segment.checkpoints / ".iter-000005.removed")
    assert checkpoints(segment) == []
    make_checkpoint(segment, 5)
    remove_checkpoint(segment.checkpoint(5))  # the leftover is no obstacle
    assert list(segment.checkpoints.iterdir()) == []
