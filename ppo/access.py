"""Where the platform is and by which key: from the environment, else from the file that `ppo up` leaves.

PPO_URL, PPO_KEY   a platform anywhere
PPO_HOME           the data folder of a local one (default: .ppo-control in the current folder)
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

DEFAULT_FOLDER = ".ppo-control"


class NoAccess(Exception):
    """Address or key is missing; the message says where to put it."""


class NoPlatform(NoAccess):
    """Nothing says where the platform is."""


@dataclass(frozen=True)
class Access:
    """Address and bearer key of a platform."""

    url: str
    key: str


def data_folder() -> Path:
    """The data folder of a local platform."""
    return Path(os.environ.get("PPO_HOME") or DEFAULT_FOLDER).expanduser().resolve()


def client_file(data: Path) -> Path:
    """Where `ppo up` writes address and key."""
    return data / "client.json"


def read_client_file(data: Path) -> Access | None:
    """What an earlier `ppo up` on this folder wrote; None when there is nothing usable."""
    try:
        fields = json.loads(client_file(data).read_text(encoding="utf-8"))
        return Access(str(fields["url"]), str(fields["key"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def find_access() -> Access:
    """Address and key for the command line.

    Raises:
        NoAccess: neither the environment nor a local platform tells.
    """
    url, key = os.environ.get("PPO_URL"), os.environ.get("PPO_KEY")
    if url and key:
        return Access(url, key)
    if url or key:
        raise NoAccess(f"{'PPO_KEY' if url else 'PPO_URL'} is not set; a platform elsewhere needs PPO_URL and PPO_KEY")
    found = read_client_file(data_folder())
    if found is None:
        raise NoPlatform(
            f"no platform is known here: {client_file(data_folder())} does not exist. Start one with `ppo up`, "
            "set PPO_HOME to the folder of one that was started with --data, or set PPO_URL and PPO_KEY"
        )
    return found
