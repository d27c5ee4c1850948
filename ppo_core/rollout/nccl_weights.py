"""Weights on their way to GPUs of other processes, on this machine or another: broadcast by NCCL, part by part.

The trainer's rank 0 is the first of the group, the workers of all servers come after it. Who they are is agreed on over
the servers' own connection, by an id that NCCL makes; everything else travels by NCCL. It needs no vLLM.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.cuda import nccl

from ppo_core.errors import EngineTimeoutError
from ppo_core.rollout.weights import digest_of, line_of

# Of the tensors of one part; they are copies, since what they are made of is good until the next is asked for only.
PART_BYTES = 256 * 2**20
POLL_S = 0.05
# Between the last worker's word that it has a part and the end of sending it.
SENT_S = 60.0


class NCCLGroup:
    """The trainer and `num_workers` of servers.

    Args:
        device: the trainer's GPU.
        num_workers: of all servers together.
        timeout_s: longest time in which they all have to come.
    """

    def __init__(self, device: torch.device, num_workers: int, timeout_s: float) -> None:
        self._device = device
        self._size = 1 + num_workers
        self._timeout_s = timeout_s
        self._id: bytes = nccl.unique_id()  # type: ignore[no-untyped-call]
        self._group: Any = None

    def invitations(self, counts: Sequence[int]) -> list[dict[str, Any]]:
        """What each server is told, of so many workers each, to come in."""
        firsts = [1 + sum(counts[:place]) for place in range(len(counts))]
        return [
            {
                "nccl_unique_id_b64": base64.b64encode(self._id).decode("ascii"),
                "rank_offset": first,
                "world_size": self._size,
                "packed": False,
            }
            for first in firsts
        ]

    def meet(self, look: Callable[[], object]) -> None:
        """Wait for all workers. NCCL itself would wait for ever, so it does so beside, and `look` is called meanwhile.

        Args:
            look: raises what keeps a server from coming.

        Raises:
            EngineTimeoutError: they did not come in time.
        """
        entering = _Beside(self._enter)
        until = time.monotonic() + self._timeout_s
        while not entering.has_ended(POLL_S):
            look()
            if time.monotonic() > until:
                raise EngineTimeoutError(
                    f"the {self._size - 1} workers of the vLLM servers did not meet the trainer by NCCL within "
                    f"{self._timeout_s:g} s",
                    hint="Look at the servers' logs, and at NCCL_SOCKET_IFNAME where machines have several networks.",
                )

    def _enter(self) -> None:
        with torch.cuda.device(self._device):
            group = nccl.init_rank(self._size, self._id, 0)  # type: ignore[no-untyped-call]
            # vLLM's workers try the group out so, and wait for it.
            nccl.all_reduce([torch.zeros(1, device=self._device)], comms=[group])  # type: ignore[no-untyped-call]
            torch.cuda.current_stream().synchronize()
        self._group = group

    def send(self, tensors: Sequence[Tensor]) -> _Beside:
        """To all workers, which take them one by one. It goes on beside the caller: a worker that is gone is waited for
        for ever."""
        torch.cuda.current_stream(self._device).synchronize()  # The tensors are there.

        def broadcast() -> None:
            assert self._group is not None  # They have met.
            with torch.cuda.device(self._device):
                for tensor in tensors:
                    nccl.broadcast([tensor], comms=[self._group])
                torch.cuda.current_stream().synchronize()

        return _Beside(broadcast)


class _Beside:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._raised: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="NCCL", daemon=True)
        self._thread.start()

    def has_ended(self, wait_s: float) -> bool:
        """Within so many seconds; raises what the call has raised."""
        self._thread.join(wait_s)
        if self._raised is not None:
            raise self._raised
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as raised:
            self._raised = raised


class NCCLWeights:
    """The parts of one transfer; each is `delivered` once the workers were told of it.

    Args:
        weights: anywhere; they travel from `device`.
        group: that has met.
        device: the trainer's GPU.
        part_bytes: after which a part is full.

    Attributes:
        digest: of all that was sent, once every part was taken.
    """

    def __init__(
        self,
        weights: Iterable[tuple[str, Tensor]],
        group: NCCLGroup,
        device: torch.device,
        part_bytes: int = PART_BYTES,
    ) -> None:
        self._weights = weights
        self._group = group
        self._device = device
        self._part_bytes = part_bytes
        self._part: list[tuple[str, Tensor]] = []
        self._sending: _Beside | None = None
        self.digest = ""

    def __enter__(self) -> NCCLWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self._part = []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        lines: list[str] = []
        size = 0
        for name, tensor in self._weights:
            lines.append(line_of(name, tensor))
            held = tensor.detach().to(self._device, copy=True, memory_format=torch.contiguous_format)
            self._part.append((name, held))
            size += held.numel() * held.element_size()
            if size >= self._part_bytes:
                yield self._fields()
                self._end_part()
                size = 0
        if self._part:
            yield self._fields()
            self._end_part()
        self.digest = digest_of(lines)

    def deliver(self) -> None:
        """Broadcast the part that was last given, in its order."""
        self._sending = self._group.send([tensor for _, tensor in self._part])

    def _end_part(self) -> None:
        """The workers have it: its memory may go."""
        if self._sending is None or not self._sending.has_ended(SENT_S):
            raise EngineTimeoutError(f"weights that all workers have received are still being sent after {SENT_S:g} s")
        self._part = []

    def _fields(self) -> dict[str, Any]:
        return {
            "names": [name for name, _ in self._part],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in self._part],
            "shapes": [list(tensor.shape) for _, tensor in self._part],
        }
