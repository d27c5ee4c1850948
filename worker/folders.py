"""Removing a deleted run's folder some at a time, so that nothing else waits for a disk."""

from __future__ import annotations

import os
import time
from pathlib import Path


def remove_some(folder: Path, until: float) -> bool:
    """Remove what is in a folder and then itself; False when `until` (monotonic) came first, to go on another time.

    Links are removed and never followed. What a crash leaves half removed is gone on with.

    Raises:
        OSError: something cannot be removed; the message names it.
    """
    if folder.is_symlink():
        folder.unlink()
        return True
    for root, folders, files in os.walk(folder, topdown=False, onerror=_unless_gone):
        for name in files:
            (Path(root) / name).unlink(missing_ok=True)
            if time.monotonic() >= until:
                return False
        for name in folders:
            child = Path(root) / name
            if child.is_symlink():
                child.unlink()
            else:
                child.rmdir()
    if folder.exists():
        folder.rmdir()
    return True


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
