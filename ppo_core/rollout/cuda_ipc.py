"""Weights on their way to a process on the same GPU: chunk by chunk through one buffer that both have mapped.

A mapped buffer is named by a handle, which travels as JSON. Torch counts how often a handle was made and let go, so
each transfer makes one, and the other side maps it once.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from ppo_core.rollout.weights import digest_of, line_of

BUFFER_BYTES = 256 * 2**20

Handles = dict[str, dict[str, Any]]  #: by the GPU's own name


def exported(buffer: Tensor) -> Handles:
    """A new handle of a buffer [n] of bytes on a GPU."""
    _, said = reduce_tensor(buffer)  # type: ignore[no-untyped-call]
    name = str(torch.cuda.get_device_properties(buffer.device).uuid)
    return {
        name: {
            "size": list(said[1]),
            "stride": list(said[2]),
            "offset": said[3],
            "device": said[6],
            "handle": _text(said[7]),
            "storage_bytes": said[8],
            "storage_offset": said[9],
            "counter": _text(said[11]),
            "counter_offset": said[12],
            "event": _text(said[13]),
            "waits_for_event": said[14],
        }
    }


def handle_of(said: dict[str, Any]) -> tuple[Any, ...]:
    """What torch rebuilds the buffer from, of what `exported` said."""
    return (
        torch.Tensor,
        torch.Size(said["size"]),
        tuple(said["stride"]),
        said["offset"],
        torch.storage.TypedStorage,
        torch.uint8,
        said["device"],
        _bytes(said["handle"]),
        said["storage_bytes"],
        said["storage_offset"],
        False,
        _bytes(said["counter"]),
        said["counter_offset"],
        _bytes(said["event"]),
        said["waits_for_event"],
    )


class CudaIPCWeights:
    """The parts of one transfer; each is good until the next is asked for.

    Args:
        weights: on the GPU that trainer and engine share.
        device: that GPU.
        buffer_bytes: of the buffer; one tensor that is larger gets a larger one.
        allocate: makes a buffer of that many bytes, on the GPU.
        export: makes a buffer's handle.

    Attributes:
        digest: of all that was sent, once every part was taken.
    """

    def __init__(
        self,
        weights: Iterable[tuple[str, Tensor]],
        device: torch.device,
        buffer_bytes: int = BUFFER_BYTES,
        allocate: Callable[[int], Tensor] | None = None,
        export: Callable[[Tensor], Handles] = exported,
    ) -> None:
        self._weights = weights
        self._device = device
        self._export = export
        self._allocate = allocate or (lambda size: torch.empty(size, dtype=torch.uint8, device=device))
        self._buffer = self._allocate(buffer_bytes)
        self.digest = ""

    def __enter__(self) -> CudaIPCWeights:
        return self

    def __exit__(self, *_: object) -> None:
        del self._buffer
        if self._device.type == "cuda":
            # The other side has let go of the buffer; only now it is free.
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        handles = self._export(self._buffer)
        lines: list[str] = []
        part = _Part()
        for name, tensor in self._weights:
            data = tensor.detach().contiguous()
            lines.append(line_of(name, data))
            flat = data.reshape(-1).view(torch.uint8)
            if part.size and part.size + len(flat) > len(self._buffer):
                yield self._whole(part, handles)
                part = _Part()
            if len(flat) > len(self._buffer):
                self._buffer = self._allocate(len(flat))
                handles = self._export(self._buffer)
            self._buffer[part.size : part.size + len(flat)].copy_(flat)
            part.add(name, data, len(flat))
        if part.size:
            yield self._whole(part, handles)
        self.digest = digest_of(lines)

    def deliver(self) -> None:
        """Nothing: it lies there to be read."""

    def _whole(self, part: _Part, handles: Handles) -> dict[str, Any]:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # The other side reads what was copied, not what will be.
        return {**part.fields, "ipc_handles": handles}


class _Part:
    """What lies in the buffer, end to end."""

    def __init__(self) -> None:
        self.size = 0
        self.fields: dict[str, list[Any]] = {"names": [], "dtype_names": [], "shapes": [], "tensor_sizes": []}

    def add(self, name: str, tensor: Tensor, num_bytes: int) -> None:
        said = (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), num_bytes)
        for field, value in zip(self.fields.values(), said, strict=True):
            field.append(value)
        self.size += num_bytes


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
