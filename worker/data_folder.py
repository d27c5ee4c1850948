"""Proof that the data folder is there and can be written, which every run needs and api and worker share."""

from __future__ import annotations

import secrets
from pathlib import Path

from ppo_core.rundir import write_atomically
from store.workers import token_file


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
