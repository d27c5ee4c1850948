"""A disk of one run's own that can be filled: a small tmpfs where one may be mounted, which takes root.

Elsewhere the scripted trainer takes it for full when it is told so (`disk_full_at`).
"""

from __future__ import annotations

import functools
import subprocess
import tempfile
from pathlib import Path
from typing import Any

SIZE = 2 * 1024 * 1024
# What is left is room for the journal's lines, and not for a checkpoint.
ROOM = 96 * 1024


def _mount(folder: Path) -> bool:
    words = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


@functools.cache
def can_be_mounted() -> bool:
    """Whether this user may mount a disk."""
    with tempfile.TemporaryDirectory() as folder:
        if not _mount(Path(folder)):
            return False
        subprocess.run(["umount", folder], check=True)
    return True


def give(folder: Path) -> dict[str, Any]:
    """Put a run's folder, which is not there yet, on a disk of its own; returns knobs where that cannot be."""
    if not can_be_mounted():
        return {"disk_full_at": 5}
    folder.mkdir(parents=True)
    assert _mount(folder)
    return {}


def fill(folder: Path) -> None:
    """Leave room for words only."""
    if can_be_mounted():
        blocks, size = map(int, subprocess.check_output(["stat", "-f", "-c", "%a %S", str(folder)]).split())
        (folder / "filler").write_bytes(b"f" * (blocks * size - ROOM))


def take_away(folder: Path) -> None:
    """Unmount every such disk in a folder, with all that is on it; the reconciler may be looking at it just now."""
    for line in Path("/proc/mounts").read_text().splitlines():
        place = line.split()[1]
        if place.startswith(f"{folder.resolve()}/"):
            subprocess.run(["umount", "--lazy", place], check=True)
