"""Whether this machine has what a run of a spec will need: main memory and disk. It asks the system and nobody else."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from ppo_core.estimate import Estimate, size_text


def shortfalls(estimate: Estimate, run_dir: Path, meminfo: Path = Path("/proc/meminfo")) -> Iterator[str]:
    """One sentence for each of memory and disk that is less than the run is estimated to need.

    Args:
        estimate: of the run's spec.
        run_dir: where checkpoints will lie; it, or a folder above it, exists.
        meminfo: what the kernel says of memory; where there is none, nothing is said.
    """
    available = _available_bytes(meminfo)
    if estimate.memory is not None and available is not None and estimate.memory.host_bytes > available:
        yield (
            f"about {size_text(estimate.memory.host_bytes)} of main memory will be needed, {size_text(available)} are "
            "free; lower update.token_budget or rollout.batch_size, or take a smaller model"
        )
    free = shutil.disk_usage(next(folder for folder in (run_dir, *run_dir.parents) if folder.exists())).free
    if estimate.disk_bytes is not None and estimate.disk_bytes > free:
        yield (
            f"about {size_text(estimate.disk_bytes)} of disk will be needed for {estimate.checkpoints_kept} "
            f"checkpoints and one under way, {size_text(free)} are free in {run_dir}; lower checkpoints.keep_last, "
            "or give another folder"
        )


def _available_bytes(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if found is None else int(found) * 1024
