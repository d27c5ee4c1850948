"""Processes of a run that are none of its supervisors: what must be gone when its state says that it rests."""

from __future__ import annotations

from pathlib import Path

from worker.processes import marked_processes


def strays(run_id: str, up_to_token: int = 10**6) -> list[int]:
    """Trainers, and whatever they started: they have a rank. A supervisor that wrote the outcome is just leaving."""
    found = []
    for process in marked_processes(run_id, up_to_token):
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it went meanwhile
        if any(entry.startswith(b"RANK=") for entry in environment):
            found.append(process.pid)
    return found
