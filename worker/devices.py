"""What this machine's GPUs are, by asking `nvidia-smi`: a worker loads no library that would open them."""

from __future__ import annotations

import csv
import logging
import subprocess
from typing import Any

from ppo_core.rundir import device_names

log = logging.getLogger("worker")

_QUERY = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]
PATIENCE_S = 10.0


class DevicesError(Exception):
    """The GPUs to give to runs are not those that can be seen; the message says which and why."""


def check_visible(number: int, visible: str | None) -> None:
    """That GPU slots 0 to `number` - 1 are so many GPUs, each its own.

    A run of a slot that nobody can see would train without a GPU, and two of one GPU in each other's memory.

    Args:
        visible: CUDA_VISIBLE_DEVICES of the worker; None says that it sees all, whichever those are.

    Raises:
        DevicesError
    """
    if visible is None or not number:
        return
    names = device_names(range(number), visible)
    if len(names) < number:
        raise DevicesError(
            f"PPO_GPUS is {number}, and CUDA_VISIBLE_DEVICES={visible!r} lets this worker see {len(names)}: set "
            "PPO_GPUS to at most that, or let it see more"
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DevicesError(f"CUDA_VISIBLE_DEVICES={visible!r} names {', '.join(twice)} twice; a GPU is one run's")


def describe_gpus(number: int, visible: str | None) -> list[dict[str, Any]]:
    """Name and memory of GPU slots 0 to `number` - 1, in their order; nothing where nobody can say.

    Args:
        visible: CUDA_VISIBLE_DEVICES of the worker, which its slots count along; None says that it sees all.
    """
    if not number:
        return []
    try:
        answer = subprocess.run(_QUERY, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        log.info("the GPUs' names are not known: %s", error)
        return []
    rows = [[cell.strip() for cell in row] for row in csv.reader(answer.splitlines())]
    found = {}
    for index, uuid, name, memory_mib in (row for row in rows if len(row) == 4):
        try:
            device = {"name": name, "memory_gib": round(float(memory_mib) / 1024, 1)}
        except ValueError:  # "[N/A]" for memory that is the machine's own
            device = {"name": name, "memory_gib": None}
        found[index] = found[uuid] = device
    unknown = {"name": None, "memory_gib": None}
    return [found.get(name, unknown) for name in device_names(range(number), visible)]
