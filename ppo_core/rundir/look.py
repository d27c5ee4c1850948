"""A quick look at a stored checkpoint, for who cannot wait until all of it is read."""

from __future__ import annotations

from pathlib import Path

from ppo_core.rundir.checkpoint_files import listed_file, stored_manifest
from ppo_core.rundir.stored_checkpoint import present_checkpoint


def look_at_checkpoint(run_dir: Path, path: str, manifest_sha256: str) -> None:
    """See that the manifest is the recorded one, and that every file is there and as long as it says.

    Milliseconds, whatever the size; `check_stored` reads the files, too.

    Raises:
        CheckpointError: names the first file that is missing or of another size.
        OSError: the disk did not answer, or is away (`StorageAwayError`); that says nothing of the checkpoint.
    """
    folder = present_checkpoint(run_dir, path)
    for name, entry in stored_manifest(folder, manifest_sha256).items():
        listed_file(folder, name, entry)
