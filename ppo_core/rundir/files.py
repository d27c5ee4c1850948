"""Files that are whole or absent, also after a power cut."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

# More than a last event takes, with a traceback in it.
_RESERVE_BYTES = 64 * 1024
# A disk and a user's share of one, as the system says it and as the writer of tensors repeats it.
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NO_SPACE_WORDS = tuple(f"os error {number}" for number in _NO_SPACE)


def no_space_left(error: BaseException) -> bool:
    """Whether a write failed since the disk, or what this user may have of it, is full."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _NO_SPACE
    return any(words in str(error) for words in _NO_SPACE_WORDS)


def write_atomically(path: Path, text: str) -> None:
    """Write a small file aside, fsync it, and rename it into place."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def reserved_space(path: Path) -> Iterator[None]:
    """Keep some space of the disk in a file, so that giving it up leaves room for a last word on a full one."""
    with contextlib.suppress(OSError), path.open("wb") as file:  # On a disk that is full already there is none to keep.
        file.write(bytes(_RESERVE_BYTES))
        os.fsync(file.fileno())
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
