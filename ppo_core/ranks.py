"""The processes that train one run together: who is who, and how they tell each other what they found.

A batch's small tensors lie on every rank, and only the expensive passes are shared out. So numbers are made from the
whole batch on every rank alike, and what is exchanged here are parts of it. Nothing here knows models.

A rank that waits for another one has a deadline, the process group's. A peer that is gone, or silent for that long, is
a `RankLostError` on all that wait.
"""

from __future__ import annotations

import os
import pickle
import socket
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d

from ppo_core.errors import PPOCoreError, RankLostError

T = TypeVar("T")
Item = TypeVar("Item")


class Unpicklable(PPOCoreError):
    """A rank failed by a fault that cannot travel as it is; the message has its kind and text."""

    code = "rank_fault"
    hint = "Look at the end of that rank's log."


class Interruption(Exception):
    """What a rank was asked from outside to give up, which is no fault of it."""


@dataclass(frozen=True)
class _Fault:
    """What was raised, and where: a traceback does not travel with its error."""

    error: Exception
    traceback: str


@dataclass(frozen=True)
class Ranks:
    """This process among the `size` ranks of its run. Alone, every call answers at once."""

    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls, deadline_s: float) -> Ranks:
        """Take the place that RANK and WORLD_SIZE give, and meet the others at MASTER_ADDR and MASTER_PORT.

        Args:
            deadline_s: how long a rank may wait for the others, here and in every exchange.

        Raises:
            RankLostError: the others did not come.
        """
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1 or dist.is_initialized():
            return cls(rank, size)
        try:
            deadline = timedelta(seconds=deadline_s)
            store = _store(rank, size, deadline)
            dist.init_process_group(backends(), store=store, rank=rank, world_size=size, timeout=deadline)
        except (OSError, RuntimeError) as error:
            raise RankLostError(
                f"rank {rank} could not meet the other ranks within {deadline_s:g} s: {error}"
            ) from error
        return cls(rank, size)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """What tensors are reduced over; None alone."""
        return dist.group.WORLD if self.size > 1 else None

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that speaks for the run."""
        return self.rank == 0

    def mine(self, items: Sequence[Item]) -> Sequence[Item]:
        """Every `size`-th of the items, this rank's."""
        return items[self.rank :: self.size]

    def gather(self, value: T) -> list[T]:
        """What every rank has, by rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        self._exchange(lambda: dist.all_gather_object(found, value))
        return found

    def together(self, local: Callable[[], T]) -> list[T]:
        """Run a part that needs no other rank, and share what came of it: all results by rank, or on all the one fault.

        A fault is raised rather than an interruption, the lowest rank's first.
        """
        if self.size == 1:
            return [local()]
        return _or_fault(self.gather(_caught(local)))

    def first(self, local: Callable[[], T]) -> T:
        """What rank 0 finds, on all ranks; its fault, too. The others do not run it."""
        if self.size == 1:
            return local()
        found: list[Any] = [_caught(local) if self.is_first else None]
        self._exchange(lambda: dist.broadcast_object_list(found, src=0))
        return _or_fault(found)[0]  # type: ignore[no-any-return]

    def add(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        if self.size > 1:
            self._exchange(lambda: dist.all_reduce(tensor))
        return tensor

    def _exchange(self, call: Callable[[], object]) -> None:
        try:
            call()
        except RuntimeError as error:  # What the back ends raise when a peer is gone or late has no type of its own.
            raise RankLostError(f"rank {self.rank} lost the other ranks: {error}") from error


def give_every_group_a_deadline(deadline_s: float) -> None:
    """Of all groups that there are now: a library that makes its own takes torch's half hour instead."""
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timedelta(seconds=deadline_s), group)


ALONE = Ranks()


def _store(rank: int, size: int, deadline: timedelta) -> TCPStore:
    """Where the ranks find each other. Torch by itself would listen on every interface of the machine, not on one."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    listener = socket.create_server((host, port)).detach() if rank == 0 else None
    return TCPStore(host, port, size, rank == 0, deadline, master_listen_fd=listener)


def backends() -> str:
    """What a process group exchanges by: objects and what lies on the host by gloo, what lies on a GPU by NCCL."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def _caught(local: Callable[[], T]) -> T | _Fault:
    try:
        return local()
    except Exception as raised:
        error = raised if _can_travel(raised) else _in_words(raised)
        return _Fault(error, "".join(traceback.format_exception(raised)))


def _in_words(error: Exception) -> Unpicklable:
    """A fault that can travel, with the text of one that cannot, and with its code where it has one."""
    travelling = Unpicklable(f"{type(error).__name__}: {error}")
    if isinstance(error, PPOCoreError):
        travelling.code, travelling.exit_code, travelling.hint = error.code, error.exit_code, error.hint
    return travelling


def _can_travel(error: Exception) -> bool:
    try:
        # One that makes its message of what it was given is made anew of the message, and says something else then.
        return str(pickle.loads(pickle.dumps(error))) == str(error)
    except Exception:
        return False


def _or_fault(found: list[T | _Fault]) -> list[T]:
    faults = [each for each in found if isinstance(each, _Fault)]
    if faults:
        # The first of those that people have to hear of: what has a name rather than what came out of a library, and
        # any fault rather than an interruption.
        fault = min(faults, key=_place)
        if fault.error.__traceback__ is None:  # It has travelled.
            fault.error.add_note(f"On the rank that failed:\n{fault.traceback}")
        raise fault.error
    return [each for each in found if not isinstance(each, _Fault)]


def _place(fault: _Fault) -> int:
    if isinstance(fault.error, PPOCoreError):
        return 0
    return 2 if isinstance(fault.error, Interruption) else 1
