"""Which faults of an exchange mean that other ranks are gone: what real process groups raise, and what NCCL says."""

from __future__ import annotations

import multiprocessing
import os
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ppo_core.main import peers_are_gone
from ppo_core.rundir.ranks import free_port, rank_environment

TIMEOUT_S = 2.0


def fault_of(tensor: torch.Tensor) -> tuple[str, bool]:
    try:
        dist.all_reduce(tensor)
    except Exception as fault:
        return f"{type(fault).__name__}: {fault}", peers_are_gone(fault)
    return "none", False


def member(rank: int, port: int, results: Any) -> None:
    os.environ.update(rank_environment(rank, 2, port, []))
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    found = {"wrong type": fault_of(torch.ones(2).to(torch.float8_e4m3fn))}
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    found["killed"] = fault_of(torch.ones(2))
    results.put(found)


def late(rank: int, port: int, results: Any) -> None:
    os.environ.update(rank_environment(rank, 2, port, []))
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    if rank == 0:
        results.put({"late": fault_of(torch.ones(2))})
    else:
        signal.pause()


def found_by(target: Any) -> dict[str, tuple[str, bool]]:
    context = multiprocessing.get_context("spawn")
    results, port = context.Queue(), free_port()
    processes = [context.Process(target=target, args=(rank, port, results)) for rank in range(2)]
    for process in processes:
        process.start()
    found: dict[str, tuple[str, bool]] = results.get(timeout=120)
    for process in processes:
        process.kill()
        process.join()
    return found


@pytest.mark.engines
def test_a_peer_that_was_killed_or_is_late_is_gone_and_a_wrong_type_is_a_fault_of_ones_own() -> None:
    found = found_by(member) | found_by(late)
    assert {case: gone for case, (_, gone) in found.items()} == {"wrong type": False, "killed": True, "late": True}, (
        found
    )
    assert "Invalid scalar type" in found["wrong type"][0]


class DistBackendError(RuntimeError):
    """As torch names its own."""


@pytest.mark.parametrize(
    ("fault", "gone"),
    [
        (DistBackendError("NCCL error ... ncclRemoteError: A call failed possibly due to a network error"), True),
        (DistBackendError("NCCL error ... remote process exited or there was a network error"), True),
        (
            DistBackendError("NCCL error ... ncclInvalidUsage: invalid usage of NCCL"),
            False,
        ),
        (DistBackendError("NCCL error ... ncclUnhandledCudaError: Failed to CUDA calloc async 608 bytes"), False),
        (RuntimeError("ProcessGroupGloo::allreduce: unsupported layout"), False),
        (RuntimeError("[.../gloo/gloo/transport/tcp/buffer.cc:10] enforce fail: sizes do not match"), False),
        (RuntimeError("Timed out waiting for the file lock of the tokenizer"), False),
        (ValueError("gloo/transport: Connection closed by peer"), False),
    ],
)
def test_only_words_about_the_other_side_count(fault: Exception, gone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert peers_are_gone(fault) is gone
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not peers_are_gone(fault)
