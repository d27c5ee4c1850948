"""The real vLLM on a processor as if it had a GPU: its order of calls is its own, only what needs CUDA is replaced.

Sleeping takes the weights away, as on a GPU, and computing while anything sleeps fails. A handle of GPU memory names
shared memory instead; vLLM's own transfer engine unpacks what lies there. What was called is noted in a file.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ppo_core.rollout.cuda_ipc import Handles
from tests.ppo_core.rollout.vllm_engines import CALLS_FILE

GPU_NAME = "GPU-of-a-test"


def shared_buffer(size: int) -> Tensor:
    """[size] bytes that another process can map."""
    memory = os.memfd_create("test-gpu-memory")
    os.ftruncate(memory, size)
    buffer = torch.frombuffer(mmap.mmap(memory, size), dtype=torch.uint8)
    buffer.memory = memory  # type: ignore[attr-defined]
    return buffer


def exported_memory(buffer: Tensor) -> Handles:
    """A handle with the fields of a real one."""
    from ppo_core.rollout.cuda_ipc import _text

    path = f"/proc/{os.getpid()}/fd/{buffer.memory}"  # type: ignore[attr-defined]
    return {
        GPU_NAME: {
            "size": list(buffer.shape),
            "stride": [1],
            "offset": 0,
            "device": 0,
            "handle": _text(path.encode()),
            "storage_bytes": len(buffer),
            "storage_offset": 0,
            "counter": _text(b"counter"),
            "counter_offset": 0,
            "event": _text(b""),
            "waits_for_event": False,
        }
    }


def _rebuilt(
    tensor_cls: type,
    size: torch.Size,
    stride: tuple[int, ...],
    offset: int,
    storage_cls: type,
    dtype: torch.dtype,
    device: int | None,
    handle: bytes,
    storage_bytes: int,
    storage_offset: int,
    requires_grad: bool,
    counter: bytes,
    counter_offset: int,
    event: bytes,
    waits_for_event: bool,
) -> Tensor:
    """In the place of torch's own, of the same arguments in the same order."""
    assert (tensor_cls, storage_cls) == (torch.Tensor, torch.storage.TypedStorage)
    assert (dtype, stride, offset, storage_offset) == (torch.uint8, (1,), 0, 0)
    assert size == torch.Size([storage_bytes])
    assert (requires_grad, counter, counter_offset, event, waits_for_event) == (False, b"counter", 0, b"", False)
    with Path(handle.decode()).open("rb") as memory:
        return torch.frombuffer(mmap.mmap(memory.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def _note(call: str) -> None:
    with Path(os.environ[CALLS_FILE]).open("a") as file:
        file.write(f"{call}\n")


if CALLS_FILE in os.environ:  # in the engine's process, before its worker is made
    import torch.multiprocessing.reductions
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.cpu_worker import CPUWorker

    from ppo_core.rollout.vllm_worker import WeightReceiver, forget_weights

    torch.multiprocessing.reductions.rebuild_cuda_tensor = _rebuilt
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=GPU_NAME)  # type: ignore[assignment]
    asleep: set[str] = set()
    _execute = CPUModelRunner.execute_model
    _plain = {
        name: getattr(CPUWorker, name)
        for name in ("start_weight_update", "update_weights", "finish_weight_update", "init_weight_transfer_engine")
    }

    def _sleep(worker: Any, level: int = 1) -> None:
        _note(f"sleep {level}")
        forget_weights(worker.get_model())
        asleep.update(("weights", "kv_cache"))

    def _wake_up(worker: Any, tags: list[str] | None = None) -> None:
        _note(f"wake {tags}")
        asleep.difference_update(tags or asleep.copy())

    def _execute_awake(runner: Any, *arguments: Any, **more: Any) -> Any:
        assert not asleep, f"computing while {asleep} sleep"
        return _execute(runner, *arguments, **more)

    def _noted(name: str) -> Any:
        def call(worker: Any, *arguments: Any, **more: Any) -> Any:
            assert "weights" not in asleep, f"{name} while the weights sleep"
            _note(name)
            return _plain[name](worker, *arguments, **more)

        return call

    CPUWorker.sleep, CPUWorker.wake_up, CPUModelRunner.execute_model = _sleep, _wake_up, _execute_awake
    for _name in _plain:
        setattr(CPUWorker, _name, _noted(_name))

    class GpuLikeReceiver(WeightReceiver):
        """The product's own: what is replaced is vLLM's."""
