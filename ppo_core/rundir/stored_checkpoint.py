"""A checkpoint by its stored path: where it lies, never outside its run's folder, and whether it is whole."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from ppo_core.errors import CheckpointError
from ppo_core.rundir.checkpoint_files import MANIFEST, read_manifest, verify_checkpoint

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


def stored_manifest(folder: Path, manifest_sha256: str) -> dict[str, dict[str, Any]]:
    """The manifest's files, once the manifest itself is the one that was recorded.

    Raises:
        CheckpointError: it is missing, another one, or cannot be read.
    """
    path = folder / MANIFEST
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if digest != manifest_sha256:
        raise CheckpointError(f"{path} has SHA-256 {digest}, when it was written it was {manifest_sha256}")
    return read_manifest(folder)


def check_stored(run_dir: Path, path: str, manifest_sha256: str) -> tuple[int, int]:
    """Compare a stored checkpoint, its manifest included, with what was recorded; returns its files and bytes.

    Raises:
        CheckpointError: names the first file that is missing, of another size or of other content.
    """
    folder = stored_checkpoint(run_dir, path)
    files = stored_manifest(folder, manifest_sha256)
    verify_checkpoint(folder)
    return len(files), sum(int(entry["bytes"]) for entry in files.values())
