"""Weights through shared memory: bit for bit, of every type and shape, and without anything left behind."""

from __future__ import annotations

import os

import torch

from ppo_core.rollout.cuda_ipc import CudaIPCWeights, Handles
from ppo_core.rollout.shared_weights import SharedWeights, read_weights
from ppo_core.rollout.weights import weights_digest

PAIRS = [
    ("b.weight", torch.randn(7, 5)),
    ("a.weight", torch.randn(3, 3, dtype=torch.bfloat16).t()),
    ("c.bias", torch.tensor([], dtype=torch.float32)),
    ("d.scale", torch.tensor(float("nan"))),
]


def test_what_is_read_is_what_was_written() -> None:
    with SharedWeights(PAIRS) as shared:
        (part,) = shared
        found = read_weights(part["path"], part["index"])
        assert shared.digest == weights_digest(found) == weights_digest(PAIRS)
        assert [name for name, _ in found] == [name for name, _ in PAIRS]
        found[0][1].zero_()  # A reader's own copy.
        assert weights_digest(read_weights(part["path"], part["index"])) == shared.digest
    assert not os.path.exists(part["path"])
    assert float(found[3][1]) != 0  # still mapped


def test_parts_of_one_buffer_hold_every_tensor_once_and_a_larger_one_gets_a_larger_buffer() -> None:
    sizes, pieces = [], []

    def exported(buffer: torch.Tensor) -> Handles:
        sizes.append(len(buffer))
        return {"GPU": {"buffer": buffer}}

    with CudaIPCWeights(PAIRS, torch.device("cpu"), buffer_bytes=32, export=exported) as transfer:
        for part in transfer:
            buffer, start = part["ipc_handles"]["GPU"]["buffer"], 0
            fields = zip(part["names"], part["dtype_names"], part["shapes"], part["tensor_sizes"], strict=True)
            for name, dtype, shape, size in fields:
                data = buffer[start : start + size].clone()
                pieces.append((name, data.view(getattr(torch, dtype)).view(shape)))
                start += size
            assert start <= len(buffer)
    assert sizes == [32, 140]
    assert weights_digest(pieces) == transfer.digest == weights_digest(PAIRS)
