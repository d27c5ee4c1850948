"""In the place of `bench.gpu.measured`, without a GPU: real trainer, real vLLM, and what needs CUDA replaced.

python -m tests.bench.gpu_like_run SEGMENT TARGET
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

import ppo_core.assembly
from bench.gpu.measured import measure
from bench.gpu.observations import GIB
from ppo_core.rollout.cuda_ipc import CudaIPCWeights
from ppo_core.rollout.vllm_engine import VLLMEngine
from ppo_core.rollout.vllm_settings import CUDA_IPC
from ppo_core.rundir import SegmentDir
from tests.ppo_core.rollout.vllm_engines import CALLS_FILE
from tests.ppo_core.rollout.vllm_gpu_like import exported_memory, shared_buffer

BUFFER_BYTES = 20_000


class GpuLikeEngine(VLLMEngine):
    """Sends weights by handles and sleeps, as on a GPU."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        extension = "tests.ppo_core.rollout.vllm_gpu_like.GpuLikeReceiver"
        super().__init__(*arguments, **more, transfer=CUDA_IPC, extension=extension)
        self._sleeps = True

    def _transferred(self, pairs: Any) -> CudaIPCWeights:
        return CudaIPCWeights(pairs, torch.device("cpu"), BUFFER_BYTES, shared_buffer, exported_memory)


class GpuLikeCard:
    """100 GiB, of which the engine's 30 are free while it sleeps, as the calls in its process tell."""

    def __init__(self, calls: Path) -> None:
        self._calls = calls

    def total_bytes(self) -> int:
        return 100 * GIB

    def free_bytes(self) -> int:
        told = [call for call in self._calls.read_text().splitlines() if call.startswith(("sleep", "wake"))]
        return (90 if told and told[-1] == "sleep 2" else 60) * GIB


def main() -> None:
    segment, target = SegmentDir(Path(sys.argv[1])), Path(sys.argv[2])
    calls = target.with_suffix(".calls")
    calls.touch()
    os.environ[CALLS_FILE] = str(calls)
    ppo_core.assembly.VLLMEngine = GpuLikeEngine  # type: ignore[misc]
    ppo_core.assembly._device = lambda spec: torch.device("cpu")
    measure(segment, GpuLikeCard(calls)).write(target)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
