"""How a checkpoint comes to lie whole on disk: the order of its steps, a fault of each, digests that tell a change."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ppo_core.errors import CheckpointError
from ppo_core.rundir import (
    JournalWriter,
    SegmentDir,
    checkpoints,
    journalled_digest,
    manifest_digest,
    new_checkpoint,
    read_manifest,
    remove_leftovers,
    verify_checkpoint,
    write_atomically,
)

CONTENTS = {
    "state.json": b'{"iteration": 5}\n',
    "policy/config.json": b"{}",
    "policy/manifest.json": b"not the checkpoint's own",
    "state/rank-0000.safetensors": bytes(range(256)) * 40,
}


@pytest.fixture
def segment(tmp_path: Path) -> SegmentDir:
    segment = SegmentDir(tmp_path / "segment-0001")
    segment.checkpoints.mkdir(parents=True)
    segment.samples.mkdir()
    return segment


def save(segment: SegmentDir, iteration: int) -> Path:
    """A checkpoint, told in the journal as the trainer does."""
    target = segment.checkpoint(iteration)
    with new_checkpoint(target) as folder:
        for name, content in CONTENTS.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
    writer = JournalWriter(segment.journal)
    payload = {"path": f"checkpoints/{target.name}", "manifest_sha256": manifest_digest(target)}
    writer.append("checkpoint", iteration, payload)
    writer.close()
    return target


class Recorder:
    """Every fsync and rename of this process in order, with what the file or folder was like at that moment."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, str, Any]] = []
        fsync, rename, replace = os.fsync, os.rename, os.replace

        def told_fsync(descriptor: int) -> None:
            fsync(descriptor)
            status = os.fstat(descriptor)
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            self.calls.append(("fsync", path, (status.st_size, status.st_mtime_ns)))

        def told(call: Callable[..., None]) -> Callable[..., None]:
            def moving(source: Any, target: Any) -> None:
                before = {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in Path(source).rglob("*")}
                call(source, target)
                self.calls.append(("rename", str(target), before))

            return moving

        patch.setattr(os, "fsync", told_fsync)
        patch.setattr(os, "rename", told(rename))
        patch.setattr(os, "replace", told(replace))

    def index(self, kind: str, path: Path) -> int:
        (found,) = (number for number, call in enumerate(self.calls) if call[:2] == (kind, str(path)))
        return found


def test_all_is_fsynced_after_its_last_write_then_renamed_then_told(
    segment: SegmentDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files and folders first, then the manifest, then the name; the journal tells of it when that is on the disk."""
    JournalWriter(segment.journal).close()
    recorder = Recorder(monkeypatch)
    target = save(segment, 5)
    renamed = recorder.index("rename", target)
    _, _, lay = recorder.calls[renamed]
    synced = {path: state for kind, path, state in recorder.calls[:renamed] if kind == "fsync"}
    folders = {str(Path(path).parent) for path in lay}
    files = [path for path in lay if path not in folders]
    assert len(files) == len(CONTENTS) + 1
    for path in files:
        # The manifest is written aside: what was synced then bears another name, of the same size and time.
        assert lay[path] in synced.values() if path.endswith("/manifest.json") else synced[path] == lay[path], path
    assert folders <= synced.keys()
    manifest = next(n for n, (kind, path, _) in enumerate(recorder.calls) if kind == "rename" and "manifest" in path)
    data = {path for path in files if path != str(Path(files[0]).parents[0] / "manifest.json")}
    synced_at = [number for number, call in enumerate(recorder.calls) if call[0] == "fsync" and call[1] in data]
    assert len(synced_at) == len(CONTENTS)
    assert max(synced_at) < manifest
    after = [call[:2] for call in recorder.calls[renamed + 1 :]]
    assert after[0] == ("fsync", str(target.parent))
    assert after[-1] == ("fsync", str(segment.journal))


def test_a_new_journals_own_name_is_on_the_disk(segment: SegmentDir, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    JournalWriter(segment.journal).close()
    assert [call[:2] for call in recorder.calls] == [("fsync", str(segment.path))]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", ["fsync", "rename", "replace", "write"])
def test_a_fault_of_any_step_leaves_the_earlier_checkpoint_alone_and_the_next_save_works(
    segment: SegmentDir, call: str, number: int
) -> None:
    """Each single call in turn fails, until there is none left to fail."""
    save(segment, 1)
    faults = 0
    while (error := fault_of_a_save(segment, faults, call, number)) is not None:
        assert error.errno == number
        assert [path.name for path in segment.checkpoints.iterdir()] == ["iter-000001"], faults
        faults += 1
    # Two files, two folders, the manifest, its folder, and the folder that the new name is in; one of the others.
    assert faults == (7 if call == "fsync" else 1)
    assert [path.name for path in checkpoints(segment)] == ["iter-000001", "iter-000002"]
    for path in checkpoints(segment):
        verify_checkpoint(path, journalled_digest(path))


def fault_of_a_save(segment: SegmentDir, failing: int, call: str, number: int) -> OSError | None:
    """Save, where call number `failing` of this kind fails; None when there are not so many calls."""
    calls = itertools.count()

    def short_write(path: Path, text: str) -> None:
        if next(calls) == failing:
            path.with_name(f".{path.name}.1.tmp").write_text(text[: len(text) // 2])
            raise OSError(number, os.strerror(number))
        write_atomically(path, text)

    def counting(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call_it(*args: Any) -> Any:
            if next(calls) == failing:
                raise OSError(number, os.strerror(number))
            return inner(*args)

        return call_it

    with pytest.MonkeyPatch.context() as patch:
        if call == "write":  # of the manifest, half
            patch.setattr("ppo_core.rundir.checkpoint_files.write_atomically", short_write)
        else:
            patch.setattr(os, call, counting(getattr(os, call)))
        try:
            with new_checkpoint(segment.checkpoint(2)) as folder:
                (folder / "state.json").write_bytes(b"x" * 5000)
                (folder / "policy").mkdir()
                (folder / "policy" / "config.json").write_bytes(b"{}")
        except OSError as error:
            return error
    return None


def test_a_flipped_bit_of_any_file_the_manifest_included_is_found_and_named(segment: SegmentDir) -> None:
    """Against the journal's digest no bit of the manifest itself can change, not even one that says the same thing."""
    target = save(segment, 5)
    digest = journalled_digest(target)
    assert digest == manifest_digest(target)
    verify_checkpoint(target, digest)
    for path in [path for path in target.rglob("*") if path.is_file()]:
        content = path.read_bytes()
        places = range(0, 8 * len(content), 1 if path == target / "manifest.json" else 997)
        for bit in places:
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            with pytest.raises(CheckpointError) as caught:
                verify_checkpoint(target, digest)
            assert str(path) in str(caught.value)
        path.write_bytes(content)
    verify_checkpoint(target, digest)


def test_a_file_that_is_named_like_the_manifest_is_hashed_as_any_other(segment: SegmentDir) -> None:
    assert "policy/manifest.json" in read_manifest(save(segment, 5))


def test_a_checkpoint_that_was_never_told_of_has_no_journalled_digest(segment: SegmentDir, tmp_path: Path) -> None:
    told = save(segment, 5)
    (segment.checkpoints / "iter-000006").mkdir()
    assert journalled_digest(segment.checkpoint(6)) is None
    shutil.copytree(told, tmp_path / "elsewhere" / "iter-000005")
    assert journalled_digest(tmp_path / "elsewhere" / "iter-000005") is None


def test_what_a_killed_writer_left_is_removed_and_nothing_else(segment: SegmentDir) -> None:
    target = save(segment, 5)
    (segment.checkpoints / ".iter-000006.77.tmp" / "policy").mkdir(parents=True)
    (segment.checkpoints / ".iter-000004.removed").mkdir()
    (segment.samples / ".iter-000006-train.jsonl.77.tmp").write_text("half")
    (segment.samples / "iter-000005-train.jsonl").write_text("whole")
    remove_leftovers(segment)
    assert list(segment.checkpoints.iterdir()) == [target]
    assert [path.name for path in segment.samples.iterdir()] == ["iter-000005-train.jsonl"]


def test_what_was_left_in_earlier_segments_goes_too_unless_they_have_a_writer(segment: SegmentDir) -> None:
    """A restart that does iterations again runs another segment than the one it was killed in."""
    later = SegmentDir(segment.path.with_name("segment-0002"))
    later.checkpoints.mkdir(parents=True)
    half, going = segment.checkpoints / ".iter-000006.77.tmp", segment.checkpoints / ".iter-000004.removed"
    half.mkdir()
    going.mkdir()
    writer = JournalWriter(segment.journal)
    remove_leftovers(later)
    assert half.exists()
    writer.close()
    remove_leftovers(later)
    assert not half.exists()
    assert going.exists()
