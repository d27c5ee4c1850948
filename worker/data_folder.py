"""Proof that the data folder is there, can be written, and is the platform's: every run needs it, and all share it."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from sqlalchemy.orm import Session, sessionmaker

from ppo_core.rundir import write_atomically
from store.data_folder import ID_FILE, folder_fault
from store.workers import token_file

# For a run's folder, its spec and the first lines of journal and logs.
LEAST_BYTES = 16 * 2**20


class DataFolderError(Exception):
    """The data folder cannot be used; the message says which and why."""


def prove_writable(data_dir: Path, worker_id: str) -> str:
    """Write a fresh token below the data folder and read it back.

    Raises:
        DataFolderError
    """
    path = token_file(data_dir, worker_id)
    token = secrets.token_hex(16)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        (data_dir / "runs").mkdir(exist_ok=True)
        write_atomically(path, token)
        if path.read_text(encoding="utf-8") != token:
            raise DataFolderError(f"{path} does not hold what was just written to it")
    except OSError as error:
        raise DataFolderError(f"PPO_DATA_DIR {data_dir} cannot be written: {error}") from error
    return token


def is_there(data_dir: Path, worker_id: str) -> bool:
    """Whether the folder that a worker proved when it started is still the one that is seen."""
    return token_file(data_dir, worker_id).is_file() and (data_dir / "runs").is_dir()


def room_fault(data_dir: Path) -> str | None:
    """What keeps a run from writing in the data folder at all; None where it can.

    Each run that is claimed nevertheless would come to rest at once, one after the other, until none is queued.
    """
    try:
        disk = os.statvfs(data_dir)
    except OSError as error:
        return f"PPO_DATA_DIR {data_dir} cannot be read: {error}"
    if disk.f_flag & os.ST_RDONLY:
        return f"PPO_DATA_DIR {data_dir} is on a disk that is read-only: mount it for writing."
    free = disk.f_bavail * disk.f_frsize
    if free < LEAST_BYTES:
        return (
            f"PPO_DATA_DIR {data_dir} is on a disk that is full: {free / 2**20:.1f} MiB are free, a run needs "
            f"{LEAST_BYTES // 2**20} MiB to begin; free space on it."
        )
    return None


def folder_id(data_dir: Path) -> str:
    """The id that lies in the folder; one is made where there is none.

    Raises:
        OSError
    """
    path = data_dir / ID_FILE
    if not path.exists():
        own = data_dir / f".{ID_FILE}-{secrets.token_hex(4)}"
        own.write_text(secrets.token_hex(8), encoding="utf-8")
        # A link, which replaces nothing: of several that come at once, all find the first one's id.
        with contextlib.suppress(FileExistsError):
            os.link(own, path)
        own.unlink()
    return path.read_text(encoding="utf-8").strip()


def data_folder_fault(sessions: sessionmaker[Session], data_dir: Path, seen_by: str) -> str | None:
    """What is wrong with the data folder as `seen_by` sees it now; None where it is the platform's."""
    try:
        found = folder_id(data_dir)
    except (OSError, ValueError) as error:
        return f"PPO_DATA_DIR {data_dir} cannot be read: {error}"
    with sessions.begin() as session:
        return folder_fault(session, data_dir, found, seen_by)
