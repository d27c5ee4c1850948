"""A checkpoint by its stored path: where it lies, never outside its run's folder, and whether it is whole."""

from __future__ import annotations

import re
from pathlib import Path

from ppo_core.errors import CheckpointError
from ppo_core.rundir.checkpoint_files import read_manifest, verify_checkpoint


class StorageAwayError(OSError):
    """Not even the folder of a checkpoint's segment is there: a disk that is away, and no damage that anybody saw."""


_STORED = re.compile(r"segment-\d{4,}/checkpoints/iter-\d{6,}")


def stored_checkpoint(run_dir: Path, path: str) -> Path:
    """The folder that `path`, relative to the run's folder, names; it need not exist.

    Raises:
        CheckpointError: the path is no checkpoint's, or a link on the way leads elsewhere.
    """
    if not _STORED.fullmatch(path):
        raise CheckpointError(f"{path!r} is no checkpoint's path: it reads segment-0001/checkpoints/iter-000020")
    # The folder of all runs may be a link that its owner made; below it there are none.
    folder = run_dir.parent.resolve() / run_dir.name / path
    if folder.resolve() != folder:
        raise CheckpointError(f"{folder} is a link, or lies behind one; a checkpoint is a folder of its own")
    return folder


def present_checkpoint(run_dir: Path, path: str) -> Path:
    """The folder of a stored checkpoint whose files are to be read now.

    Raises:
        CheckpointError: as `stored_checkpoint`.
        StorageAwayError: its segment's folder is not there, so nothing about the checkpoint can be known.
    """
    folder = stored_checkpoint(run_dir, path)
    segment = folder.parent.parent
    if not segment.is_dir():
        raise StorageAwayError(f"{segment} is not there: is the right disk mounted?")
    return folder


def check_stored(run_dir: Path, path: str, manifest_sha256: str) -> tuple[int, int]:
    """Compare a stored checkpoint, its manifest included, with what was recorded; returns its files and bytes.

    Raises:
        CheckpointError: names the first file that is missing, of another size or of other content.
        OSError: the disk did not answer, or is away (`StorageAwayError`); that says nothing of the checkpoint.
    """
    folder = present_checkpoint(run_dir, path)
    verify_checkpoint(folder, manifest_sha256)
    files = read_manifest(folder)
    return len(files), sum(int(entry["bytes"]) for entry in files.values())
