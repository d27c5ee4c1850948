"""The folder of temporary files of a trainer's own engines, gone with them.

A trainer that is killed cannot clean up, and neither can its engines, which die with it. So the folder is locked as
long as its trainer lives, in whichever container that is; a later start removes what nobody has locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
import weakref
from pathlib import Path

PREFIX = "ppo-vllm-"
# One that is just being made is not locked yet.
YOUNG_S = 60.0


class EngineFolder:
    """A new one at `path`; what trainers that were killed have left behind beside it goes."""

    def __init__(self) -> None:
        remove_left_behind(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._end = weakref.finalize(self, _remove, self.path, _locked(self.path))

    def remove(self) -> None:
        """Harmless when repeated."""
        self._end()


def remove_left_behind(root: Path, young_s: float = YOUNG_S) -> None:
    """Remove this user's folders under `root` that no living trainer has, as far as that is possible."""
    for folder in root.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # Another start may be faster.
            found = folder.lstat()
            if found.st_uid == os.getuid() and time.time() - found.st_mtime > young_s:
                _remove(folder, _locked(folder))


def _locked(folder: Path) -> int:
    """The folder, opened and locked.

    Raises:
        BlockingIOError: its trainer lives.
        OSError: it is gone, or is a link or no folder.
    """
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(opened)
        raise
    return opened


def _remove(folder: Path, opened: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(opened)
