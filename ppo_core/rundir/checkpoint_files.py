"""Checkpoints as files: written aside, hashed, renamed, verified, removed."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from ppo_core.errors import CheckpointError
from ppo_core.rundir.files import fsync_folder, write_atomically
from ppo_core.rundir.journal import all_events, has_writer
from ppo_core.rundir.segments import SegmentDir, segments

MANIFEST = "manifest.json"
_CHECKPOINT = re.compile(r"^iter-(\d{6,})$")
_GONE = ".gone"


def checkpoint_iteration(folder: Path) -> int | None:
    """The iteration in a checkpoint folder's name; None for any other name."""
    match = _CHECKPOINT.match(folder.name)
    return int(match[1]) if match else None


def checkpoints(segment: SegmentDir) -> list[Path]:
    """The segment's whole checkpoints, lowest iteration first, compared as numbers."""
    found = [
        (iteration, child)
        for child in (segment.checkpoints.iterdir() if segment.checkpoints.is_dir() else ())
        if (iteration := checkpoint_iteration(child)) is not None and (child / MANIFEST).is_file()
    ]
    return [path for _, path in sorted(found)]


@contextlib.contextmanager
def new_checkpoint(target: Path) -> Iterator[Path]:
    """A folder to fill; on leaving it is hashed, fsynced and renamed to `target`, or removed if anything failed.

    Raises:
        CheckpointError: there is a checkpoint of this name.
        OSError: writing, fsync or rename failed; nothing of it stays.
    """
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        write_manifest(aside)
        if target.exists():
            raise CheckpointError(f"{target} exists already; a checkpoint is never overwritten")
        aside.rename(target)
        try:
            fsync_folder(target.parent)
        except OSError:  # Whether its name would survive a power cut is not known, so nobody shall build on it.
            target.rename(aside)
            raise
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def write_manifest(folder: Path) -> None:
    """Fsync every file of `folder` and write its size and SHA-256 to `manifest.json`."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / MANIFEST:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                os.fsync(file.fileno())
            files[path.relative_to(folder).as_posix()] = {"sha256": digest, "bytes": path.stat().st_size}
    for path in [folder, *(child for child in folder.rglob("*") if child.is_dir())]:
        fsync_folder(path)
    write_atomically(folder / MANIFEST, json.dumps({"format": 1, "files": files}, indent=1) + "\n")


def read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """`{file: {"sha256": ..., "bytes": ...}}` of a checkpoint.

    Raises:
        CheckpointError: there is no manifest, or it cannot be read.
    """
    path = folder / MANIFEST
    try:
        files: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["files"]
        for name, entry in files.items():
            if not isinstance(entry["sha256"], str) or not isinstance(entry["bytes"], int):
                raise ValueError(f"the entry of {name!r} has no sha256 and bytes")
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise ValueError(f"{name!r} lies outside the checkpoint")
        if not files:
            raise ValueError("it lists no file")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read, so this is no whole checkpoint: {error}") from error
    return files


def stored_manifest(folder: Path, manifest_sha256: str) -> dict[str, dict[str, Any]]:
    """The manifest's files, once the manifest itself is the one that was recorded.

    Raises:
        CheckpointError: it is missing, another one, or no plain file.
        OSError: the disk did not answer; that says nothing of the checkpoint.
    """
    path = folder / MANIFEST
    try:
        digest = manifest_digest(folder)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (NotADirectoryError, IsADirectoryError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if digest != manifest_sha256:
        raise CheckpointError(f"{path} has SHA-256 {digest}, when it was written it was {manifest_sha256}")
    return read_manifest(folder)


def verify_checkpoint(folder: Path, manifest_sha256: str | None = None) -> None:
    """Compare every file of a checkpoint with its manifest, and the manifest itself with `manifest_sha256` if given.

    The manifest's digest stands in the journal and in the database; without it, a change of the manifest that leaves
    its list of files as it was is not seen.

    Raises:
        CheckpointError: names the first file that is missing, of another size, or of other content.
    """
    files = read_manifest(folder) if manifest_sha256 is None else stored_manifest(folder, manifest_sha256)
    for name, entry in files.items():
        path = listed_file(folder, name, entry)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != entry["sha256"]:
            raise CheckpointError(f"{path} has SHA-256 {digest}, its manifest says {entry['sha256']}")


def listed_file(folder: Path, name: str, entry: Mapping[str, Any]) -> Path:
    """The file of a manifest's entry, once it is there and as long as the manifest says.

    Raises:
        CheckpointError: it is missing, or of another size.
    """
    path = folder / name
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise CheckpointError(f"{path} has {size} bytes, its manifest says {entry['bytes']}")
    return path


def manifest_digest(folder: Path) -> str:
    """SHA-256 of a checkpoint's manifest: one number for the content of all its files."""
    return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()


def journalled_digest(folder: Path) -> str | None:
    """What the journal of its segment says of a checkpoint's manifest; None where the checkpoint was never told of.

    So it is for one whose writer was killed between rename and journal, and for one outside a run directory.

    Raises:
        RunDirectoryError: the journal cannot be read.
    """
    segment = SegmentDir(folder.parent.parent)
    told = (event.payload for event in all_events(segment.journal) if event.type == "checkpoint")
    path = f"{folder.parent.name}/{folder.name}"
    return next((str(each["manifest_sha256"]) for each in told if each.get("path") == path), None)


def checkpoint_bytes(folder: Path) -> int:
    """Size of a whole checkpoint, by its manifest."""
    return sum(int(entry["bytes"]) for entry in read_manifest(folder).values())


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint: first its name, so that nobody ever sees half of one, then its files."""
    gone = folder.with_name(f".{folder.name}.removed")
    shutil.rmtree(gone, ignore_errors=True)
    folder.rename(gone)
    fsync_folder(folder.parent)
    shutil.rmtree(gone)


def remove_leftovers(segment: SegmentDir) -> None:
    """Remove what killed writers left half-done of checkpoints and samples, here and in the run's earlier segments.

    Only this segment's owner may call it. An earlier one that has a writer still is left alone.
    """
    for child in segment.checkpoints.glob(".iter-*"):
        shutil.rmtree(child, ignore_errors=True)
    _remove_half_samples(segment)
    for earlier in itertools.takewhile(lambda each: each.path.name != segment.path.name, segments(segment.path.parent)):
        if not has_writer(earlier.journal):
            # Whoever removes old checkpoints may be at work there, so only what was being written.
            for child in earlier.checkpoints.glob(".iter-*.tmp"):
                shutil.rmtree(child, ignore_errors=True)
            _remove_half_samples(earlier)


def set_leftovers_aside(segment: SegmentDir) -> list[Path]:
    """Give what killed writers left half-done of a segment's checkpoints names that no writer uses; returns them.

    Quick, so that it can be done while nobody may begin to write there; removing them may take long.
    """
    aside = []
    for child in segment.checkpoints.glob(".iter-*"):
        gone = child if child.name.endswith(_GONE) else child.with_name(child.name + _GONE)
        with contextlib.suppress(OSError):  # somebody else removes it just now
            child.rename(gone)
            aside.append(gone)
    _remove_half_samples(segment)
    return aside


def _remove_half_samples(segment: SegmentDir) -> None:
    for child in segment.samples.glob(".*.tmp"):
        child.unlink(missing_ok=True)
