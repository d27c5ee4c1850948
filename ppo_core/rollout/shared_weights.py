"""Weights on their way to a process of this machine: shared memory without a name, written tensor by tensor.

It has no file that could be left behind, and does not count against a container's small `/dev/shm`. It holds bytes
alone; what lies where is the index, which travels with the request to read it. The digest is made of the tensors as
they are written, never of the memory. Linux only.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ppo_core.rollout.weights import weights_digest

ALIGNMENT = 64


class SharedWeights:
    """One transfer; its memory is gone after the `with` block, once its last reader is.

    Attributes:
        index: name, dtype, shape and offset of each tensor, in the order in which they came.
        digest: of all that was sent, once the part was taken.
    """

    def __init__(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._weights = weights
        self._memory = os.memfd_create("ppo-weights")
        self.index: list[dict[str, Any]] = []
        self.digest = ""
        self._size = 0

    @property
    def path(self) -> str:
        """By which other processes of this user open it."""
        return f"/proc/{os.getpid()}/fd/{self._memory}"

    def __enter__(self) -> SharedWeights:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._memory)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The one part of the transfer: path and index, once all is written."""
        self.digest = weights_digest(self._written())
        yield {"path": self.path, "index": self.index}

    def deliver(self) -> None:
        """Nothing: it lies there to be read."""

    def _written(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._weights:
            held = tensor.detach().cpu().contiguous()
            dtype = str(held.dtype).removeprefix("torch.")
            self.index.append({"name": name, "dtype": dtype, "shape": list(held.shape), "offset": self._size})
            data = held.reshape(-1).view(torch.uint8).numpy().data
            written = 0
            while written < len(data):  # the kernel takes at most 2 GiB at once
                written += os.pwrite(self._memory, data[written:], self._size + written)
            self._size += -(-len(data) // ALIGNMENT) * ALIGNMENT
            yield name, held


def read_weights(path: str, index: list[dict[str, Any]]) -> list[tuple[str, Tensor]]:
    """The tensors, in the index's order, as views of the memory: nothing is copied, and nothing written to them is seen
    by others."""
    with Path(path).open("rb") as memory:
        mapped = mmap.mmap(memory.fileno(), 0, access=mmap.ACCESS_COPY)
    pairs = []
    for entry in index:
        dtype, count = getattr(torch, entry["dtype"]), torch.Size(entry["shape"]).numel()
        flat = (
            torch.frombuffer(mapped, dtype=dtype, count=count, offset=entry["offset"])
            if count
            else torch.empty(0, dtype=dtype)
        )
        pairs.append((entry["name"], flat.view(entry["shape"])))
    return pairs
