"""The matrix-product speed of this machine, measured on the model's own shapes: the ceiling for `limit/fraction`."""

from __future__ import annotations

import time

import torch

from ppo_core.model_shape import ModelShape

# Enough rows to be bound by arithmetic on any device, few enough for a laptop's memory.
MAX_ROWS = 4096
# A product with a vocabulary of 150,000 and 4,096 rows would hold gigabytes; as many columns show the same speed.
MAX_COLUMNS = 16384


def calibrate(
    shape: ModelShape, device: torch.device, dtype: torch.dtype = torch.float32, rows: int = 1024, seconds: float = 0.2
) -> float:
    """Floating-point operations a second of the fastest of the model's matrix products, in about `seconds`.

    The best of several tries counts: what a loaded machine can do at a quiet moment is its limit. No random number is
    drawn, so that a run's numbers do not depend on it.

    Args:
        shape: sizes of the policy.
        device, dtype: where and in which precision the run computes.
        rows: tokens of one product; the run's token budget is a good choice.
        seconds: time to spend, shared by the shapes.
    """
    products = [(shape.hidden, shape.intermediate), (shape.hidden, min(shape.vocabulary, MAX_COLUMNS))]
    rows = max(1, min(rows, MAX_ROWS))
    return max(_speed(rows, inner, columns, device, dtype, seconds / len(products)) for inner, columns in products)


@torch.no_grad()
def _speed(rows: int, inner: int, columns: int, device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    left = torch.ones(rows, inner, device=device, dtype=dtype)
    right = torch.ones(inner, columns, device=device, dtype=dtype)
    out = torch.empty(rows, columns, device=device, dtype=dtype)
    torch.mm(left, right, out=out)  # The first call sets up threads and handles.
    _wait(device)
    best = float("inf")
    end = time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        _wait(device)
        now = time.perf_counter()
        best = min(best, now - start)
        if now >= end:
            return 2.0 * rows * inner * columns / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
