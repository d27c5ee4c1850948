"""A checkpoint as one tar file, made while it is sent: nothing is held whole, and its length is known before.

All files are opened first. Whoever removes the checkpoint meanwhile takes away names, not what is being read. Each file
is hashed on its way: where one differs from the manifest the transfer breaks off, short of its announced length, so
that no reader takes it for whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Literal

from ppo_core.errors import CheckpointError
from ppo_core.rundir import MANIFEST, present_checkpoint, stored_manifest

Part = Literal["all", "policy"]
CHUNK = 1024 * 1024
_END = bytes(2 * tarfile.BLOCKSIZE)


@dataclass(frozen=True)
class _Member:
    header: bytes
    file: BinaryIO
    bytes: int
    sha256: str

    @property
    def padding(self) -> int:
        return -self.bytes % tarfile.BLOCKSIZE


class Archive:
    """An opened checkpoint. `chunks` is read once, and closes the files however it ends."""

    def __init__(self, members: list[_Member], files: contextlib.ExitStack) -> None:
        self._members = members
        self._files = files
        self.bytes = len(_END) + sum(len(m.header) + m.bytes + m.padding for m in members)

    def chunks(self) -> Iterator[bytes]:
        """The tar's bytes.

        Raises:
            CheckpointError: a file is not what the manifest says; what was sent before is not to be used.
        """
        with self._files:
            for member in self._members:
                yield member.header
                digest, left = hashlib.sha256(), member.bytes
                while left:
                    data = member.file.read(min(CHUNK, left))
                    if not data:
                        raise CheckpointError(f"{member.file.name} became shorter while it was read")
                    digest.update(data)
                    left -= len(data)
                    if not left and digest.hexdigest() != member.sha256:
                        raise CheckpointError(f"{member.file.name} is not what its manifest says")
                    yield data
                yield bytes(member.padding)
            yield _END


def open_archive(run_dir: Path, path: str, manifest_sha256: str, part: Part, name: str) -> Archive:
    """Open a checkpoint's files, or those of its policy; in the tar they lie in a folder called `name`.

    Raises:
        CheckpointError: a file is missing, of another size, or no plain file.
        OSError: the disk did not answer, or is away.
    """
    folder = present_checkpoint(run_dir, path)
    listed = stored_manifest(folder, manifest_sha256)
    files = contextlib.ExitStack()
    try:
        members = []
        if part == "all":
            manifest = (folder / MANIFEST).stat().st_size
            members.append(_open(files, folder, MANIFEST, f"{name}/{MANIFEST}", manifest, manifest_sha256))
        for file, entry in sorted(listed.items()):
            inside = PurePosixPath(file)
            if part == "policy":
                if inside.parts[0] != "policy":
                    continue
                inside = inside.relative_to("policy")
            members.append(_open(files, folder, file, f"{name}/{inside}", int(entry["bytes"]), entry["sha256"]))
        return Archive(members, files)
    except BaseException:
        files.close()
        raise


def _open(files: contextlib.ExitStack, folder: Path, file: str, name: str, size: int, sha256: str) -> _Member:
    path = folder / file
    if path.parent.resolve() != path.parent:
        raise CheckpointError(f"{path} lies behind a link")
    try:
        opened = files.enter_context(os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    found = os.fstat(opened.fileno())
    if found.st_size != size:
        raise CheckpointError(f"{path} has {found.st_size} bytes, its manifest says {size}")
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = size, int(found.st_mtime), 0o644
    return _Member(info.tobuf(tarfile.PAX_FORMAT), opened, size, sha256)
