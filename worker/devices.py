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
