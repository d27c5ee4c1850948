"""One run in a process of its own, and what can be seen of it: `python -m bench.gpu.measured SEGMENT TARGET`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from bench.gpu.observations import Observations, Sleep, Sync
from ppo_core.main import run_segment
from ppo_core.rollout.engine import Response, SyncReport
from ppo_core.rollout.vllm_engine import VLLMEngine
from ppo_core.rollout.weights import PolicyWeights, Probe, weights_digest
from ppo_core.rundir import SegmentDir, read_journal


class Card(Protocol):
    """The GPU, as far as its memory goes."""

    def total_bytes(self) -> int: ...

    def free_bytes(self) -> int:
        """What no process holds."""
        ...


class CudaCard:
    """The first GPU that this process sees."""

    def total_bytes(self) -> int:
        return torch.cuda.mem_get_info()[1]

    def free_bytes(self) -> int:
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]


class WatchedEngine:
    """The run's own engine, with a look at clock and card wherever it sleeps or takes over weights."""

    def __init__(self, engine: VLLMEngine, card: Card) -> None:
        self._engine, self._card = engine, card
        self.syncs: list[Sync] = []
        self.sleeps: list[Sleep] = []

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def rows_at_once(self) -> int | None:
        return self._engine.rows_at_once

    def generate(
        self, prompt_ids: list[list[int]], *, seeds: list[int], check: Callable[[], None] | None = None
    ) -> list[Response]:
        return self._engine.generate(prompt_ids, seeds=seeds, check=check)

    def sync_weights(self, weights: PolicyWeights, probe: Probe, version: int) -> SyncReport:
        began = time.monotonic()
        report = self._engine.sync_weights(weights, probe, version)
        self.syncs.append(Sync(report.version, report.digest, report.probe_gap, time.monotonic() - began))
        return report

    def rest(self) -> None:
        before, began = self._card.free_bytes(), time.monotonic()
        self._engine.rest()
        seconds = time.monotonic() - began
        self.sleeps.append(Sleep(before, self._card.free_bytes(), seconds))

    def close(self) -> None:
        self._engine.close()


def measure(segment: SegmentDir, card: Card) -> Observations:
    """Run the segment in this process."""
    spec = segment.read_start().spec
    began = time.monotonic()
    watched: list[tuple[Any, WatchedEngine, str, list[int], float]] = []

    def watch(trainer: Any) -> None:
        engine = trainer.models.engine
        wrapped = WatchedEngine(engine, card)
        watched.append((trainer.models.trainer, wrapped, engine.transfer, engine.pids, time.monotonic() - began))
        trainer.models = replace(trainer.models, engine=wrapped)

    code = run_segment(segment, token=0, attempt=1, change=watch)
    events, _ = read_journal(segment.journal)
    error = next((event.payload["error"] for event in events if event.type == "end"), None)
    metrics = [event.payload for event in events if event.type == "metrics"]
    seen = Observations(
        engine=spec["training"]["engine"],
        num_iterations=spec["iterations"],
        exit_code=int(code),
        error=f"{error['code']}: {error['message']}" if error else "",
        metrics=metrics,
        share_bytes=int(spec["rollout"]["vllm"]["gpu_memory_utilization"] * card.total_bytes()),
        peak_gib=max((each.get("memory/peak_gib") or 0.0 for each in metrics), default=0.0),
    )
    if not watched:  # It ended while it was loading.
        return seen
    trainer, engine, transfer, pids, loading_s = watched[0]
    return replace(
        seen,
        transfer=transfer,
        syncs=engine.syncs,
        sleeps=engine.sleeps,
        trainer_digest=weights_digest(trainer.weights()),
        num_left=sum(_is_alive(pid) for pid in pids),
        loading_s=loading_s,
    )


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    """Measure one run, and leave as trainers do: no library's farewell can hang."""
    segment, target = SegmentDir(Path(sys.argv[1])), Path(sys.argv[2])
    measure(segment, CudaCard()).write(target)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
