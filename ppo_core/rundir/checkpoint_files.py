"""Checkpoints as files: written aside, hashed, renamed, verified, removed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from ppo_core.errors import CheckpointError
from ppo_core.rundir.files import fsync_folder, write_atomically
from ppo_core.rundir.segments import SegmentDir

MANIFEST = "manifest.json"
_CHECKPOINT = re.compile(r"^iter-(\d{6,})$")


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
    """A folder to fill; on leaving it is hashed, fsynced and renamed to `target`, or removed if anything failed."""
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        write_manifest(aside)
        if target.exists():
            raise CheckpointError(f"{target} exists already; a checkpoint is never overwritten")
        aside.rename(target)
        fsync_folder(target.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def write_manifest(folder: Path) -> None:
    """Fsync every file of `folder` and write its size and SHA-256 to `manifest.json`."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
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


def verify_checkpoint(folder: Path) -> None:
    """Compare every file of a checkpoint with its manifest.

    Raises:
        CheckpointError: names the first file that is missing, of another size, or of other content.
    """
    for name, entry in read_manifest(folder).items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise CheckpointError(f"{path} has {size} bytes, its manifest says {entry['bytes']}")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != entry["sha256"]:
            raise CheckpointError(f"{path} has SHA-256 {digest}, its manifest says {entry['sha256']}")


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
    """Remove what a killed writer left half-done among the checkpoints. Only the owner of the segment may call it."""
    for child in segment.checkpoints.glob(".iter-*"):
        shutil.rmtree(child, ignore_errors=True)
