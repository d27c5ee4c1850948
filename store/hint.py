"""The names that a hint travels under, agreed between the web service and the workers. It carries nothing else."""

from __future__ import annotations

HINT_TASK = "worker.hint"
HINT_QUEUE = "ppo-hints"
