"""The ranks of an attempt, for whoever starts them: how many, where they meet, and what each has in its environment."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ppo_core.errors import RunDirectoryError

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo"
# Below it lie the ports of well-known services.
_LOWEST_PORT = 10240
_PORT_TRIES = 100


def num_ranks(spec: Mapping[str, Any]) -> int:
    """How many trainer processes an attempt of this resolved spec has."""
    return int(spec.get("training", {}).get("ranks", 1))


def free_port() -> int:
    """A loopback port that nobody listens on, for the ranks of one attempt to meet at.

    It is chosen below the range from which the kernel gives ports to outgoing connections: out of that range one of
    them could take it before rank 0 listens, even a rank's own, which is then connected to itself.

    Raises:
        RunDirectoryError: a hundred ports drawn at random are all in use.
    """
    kernels = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    candidates = range(_LOWEST_PORT, max(kernels, _LOWEST_PORT + 1000))
    for port in random.sample(candidates, _PORT_TRIES):
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind((LOOPBACK, port))
            return port
    raise RunDirectoryError(
        f"{_PORT_TRIES} ports between {candidates[0]} and {candidates[-1]} are in use, none is free for the ranks to "
        "meet at",
        hint="Look at what listens on this machine.",
    )


def rank_environment(rank: int, size: int, port: int, devices: Sequence[str]) -> dict[str, str]:
    """What tells a trainer process which rank of how many it is, where rank 0 listens, and which GPUs are its own.

    It is the same for one rank alone, so that a group which whoever starts it belongs to is not taken for its own.

    Args:
        rank, size: from 0 on, and how many there are.
        port: the one of `free_port`, the same for all ranks of the attempt.
        devices: the run's GPUs as CUDA names them; each rank sees an equal share of its own, none where there are none.
    """
    share = len(devices) // size
    own = devices[rank * share : (rank + 1) * share]
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        # Libraries take it for the number of their device, which is counted among those that the process sees.
        "LOCAL_RANK": "0" if own else str(rank),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        # Else they listen where the machine's name leads, which may be a network.
        "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE,
        "NCCL_SOCKET_IFNAME": LOOPBACK_INTERFACE,
        "CUDA_VISIBLE_DEVICES": ",".join(own),
    }


def device_names(gpus: Sequence[int], visible: str | None) -> list[str]:
    """GPUs counted among those that whoever starts the ranks may see, by their names in CUDA_VISIBLE_DEVICES.

    Args:
        gpus: numbers from 0 on; those beyond what may be seen are left out.
        visible: the starter's own CUDA_VISIBLE_DEVICES; None says that it sees all.
    """
    if visible is None:
        return [str(number) for number in gpus]
    names = [name for part in visible.split(",") if (name := part.strip())]
    # CUDA reads the list up to the first name of no device, and -1 is how people write that.
    names = list(itertools.takewhile(lambda name: not name.startswith("-"), names))
    return [names[number] for number in gpus if number < len(names)]
