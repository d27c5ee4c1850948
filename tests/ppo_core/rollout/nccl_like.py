"""NCCL among threads of one process, stricter than NCCL: a broadcast that its members do not make alike fails.

The trainer's end stands in for `torch.cuda.nccl`, the workers' for vLLM's communicator. The workers themselves are
vLLM's own transfer engine: it reads the invitations and takes the weights.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.cuda import nccl

from ppo_core.errors import EngineLostError, RolloutError
from ppo_core.models.policy import PolicyModel
from ppo_core.rollout.vllm_replica import Message
from ppo_core.rollout.vllm_settings import NCCL
from ppo_core.rollout.weights import digest_of, line_of, probe_of

WAIT_S = 20.0
ID = bytes(range(128))


class Network:
    """What all members of a group go through."""

    def __init__(self) -> None:
        self._joined = threading.Condition()
        self._members: dict[int, queue.Queue[Tensor]] = {}
        self._summed: set[int] = set()
        self._size = 0

    def join(self, size: int, uid: bytes, rank: int) -> int:
        """Waits until all are there, as NCCL does, and has been tried out by all."""
        assert uid == ID
        with self._joined:
            assert self._size in (0, size), "members disagree about their number"
            assert 0 <= rank < size, f"rank {rank} of {size}"
            assert rank not in self._members, f"two members are rank {rank}"
            self._size = size
            self._members[rank] = queue.Queue()
            self._joined.notify_all()
            assert self._joined.wait_for(lambda: len(self._members) == size, WAIT_S), "not all have come"
        return rank

    def all_reduce(self, rank: int, tensor: Tensor) -> None:
        assert tensor.numel() == 1
        with self._joined:
            self._summed.add(rank)
            self._joined.notify_all()
            assert self._joined.wait_for(lambda: len(self._summed) == self._size, WAIT_S), "not all try the group out"

    def send(self, tensor: Tensor) -> None:
        assert tensor.is_contiguous()
        for rank, member in self._members.items():
            if rank:
                member.put(tensor.clone())

    def receive(self, rank: int, into: Tensor) -> None:
        sent = self._members[rank].get(timeout=WAIT_S)
        assert (sent.shape, sent.dtype) == (into.shape, into.dtype)
        into.copy_(sent)


class WorkerEnd:
    """In the place of vLLM's communicator, by the calls that its transfer engine makes."""

    network: Network

    def __init__(self, rank: int) -> None:
        self._rank = rank

    @classmethod
    def from_unique_id_bytes(
        cls, unique_id_bytes: bytes, rank: int, world_size: int, device: Any, library_path: str | None = None
    ) -> WorkerEnd:
        cls.network.join(world_size, unique_id_bytes, rank)
        cls.network.all_reduce(rank, torch.zeros(1))
        return cls(rank)

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        assert src == 0
        self.network.receive(self._rank, tensor)


def put_in_place(patch: pytest.MonkeyPatch) -> Network:
    """The stand-ins for what needs a GPU, in torch and in vLLM."""
    from vllm.distributed.device_communicators import pynccl

    network = Network()
    stream = SimpleNamespace(synchronize=lambda: None)

    def all_reduce(inputs: list[Tensor], *, comms: list[int]) -> None:
        network.all_reduce(comms[0], inputs[0])

    def broadcast(inputs: list[Tensor], *, comms: list[int]) -> None:
        assert len(inputs) == len(comms) == 1
        assert comms == [0]
        network.send(inputs[0])

    patch.setattr(nccl, "unique_id", lambda: ID)
    patch.setattr(nccl, "init_rank", network.join)
    patch.setattr(nccl, "all_reduce", all_reduce)
    patch.setattr(nccl, "broadcast", broadcast)
    patch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    patch.setattr(torch.cuda, "device", lambda device: nullcontext())
    patch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    patch.setattr(WorkerEnd, "network", network, raising=False)
    patch.setattr(pynccl, "PyNcclCommunicator", WorkerEnd)
    return network


class Loading:
    """A worker's model: it notes what it is given to load."""

    def __init__(self) -> None:
        self.pairs: dict[str, Tensor] = {}

    def load_weights(self, pairs: list[tuple[str, Tensor]]) -> None:
        self.pairs |= {name: tensor.clone() for name, tensor in pairs}


class NCCLServer:
    """A replica of `num_workers` of vLLM's transfer engines. `policy` says what it is to make of its weights."""

    def __init__(self, name: str, num_workers: int, policy: PolicyModel) -> None:
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        self.name = name
        self.models = [Loading() for _ in range(num_workers)]
        self.refuses_to_meet = self.dies = False
        self.num_updates = 0
        self._policy = policy
        self._version = ""
        self._answers: list[Callable[[float], Message | None]] = []
        self._engines = [
            NCCLWeightTransferEngine(
                WeightTransferConfig(backend="nccl"),
                SimpleNamespace(  # type: ignore[arg-type]
                    parallel_config=SimpleNamespace(data_parallel_index=0, world_size=num_workers, rank=rank),
                    model_config=None,
                ),
                torch.device("cpu"),
                model,  # type: ignore[arg-type]
            )
            for rank, model in enumerate(self.models)
        ]

    def ask(self, operation: str, *, timeout_s: float | None = None, **arguments: Any) -> int:
        self._answers.append(getattr(self, f"_{operation}")(**arguments))
        return len(self._answers) - 1

    def answer(self, call: int, wait_s: float) -> Message | None:
        return self._answers[call](wait_s)

    def abort(self, call: int, timeout_s: float) -> None:
        raise AssertionError("nothing is generated")

    def kill(self) -> None:
        pass

    def _at_once(self, **answer: Any) -> Callable[[float], Message | None]:
        return lambda wait_s: answer

    def _by_all(self, call: Callable[[Any], None]) -> Callable[[float], Message | None]:
        raised: list[BaseException] = []

        def run(engine: Any) -> None:
            try:
                call(engine)
            except BaseException as error:
                raised.append(error)

        threads = [threading.Thread(target=run, args=(engine,), daemon=True) for engine in self._engines]
        for thread in threads:
            thread.start()

        def answer(wait_s: float) -> Message | None:
            for thread in threads:
                thread.join(wait_s)
            if raised:
                raise raised[0]
            return None if any(thread.is_alive() for thread in threads) else {}

        return answer

    def _start(self, settings: dict[str, Any]) -> Any:
        return self._at_once(transfer=NCCL, world_size=len(self.models))

    def _meet(self, invitation: dict[str, Any]) -> Any:
        if self.refuses_to_meet:

            def refuse(wait_s: float) -> Message | None:
                raise RolloutError(f"{self.name}: NCCL finds no network")

            return refuse
        return self._by_all(lambda engine: engine.init_transfer_engine(engine.parse_init_info(invitation)))

    def _begin_update(self) -> Any:
        for model in self.models:
            model.pairs = {}
        return self._at_once()

    def _update(self, part: dict[str, Any]) -> Any:
        self.num_updates += 1
        if self.dies:

            def lost(wait_s: float) -> Message | None:
                raise EngineLostError(f"{self.name} is gone")

            return lost
        return self._by_all(lambda engine: engine.receive_weights(engine.parse_update_info(part)))

    def _digest(self) -> str:
        found = {digest_of(line_of(*pair) for pair in model.pairs.items()) for model in self.models}
        assert len(found) == 1
        return found.pop()

    def _finish_update(self, version: str) -> Any:
        self._version = version
        return self._at_once(digest=self._digest(), num_tensors=len(self.models[0].pairs))

    def _fingerprint(self) -> Any:
        return self._at_once(workers=[self._digest()])

    def _examine(self, probe: list[list[int]]) -> Any:
        self._policy.model.load_state_dict(self.models[-1].pairs, strict=False)
        own = probe_of(self._policy)
        assert [list(row) for row in own.rows] == probe
        return self._at_once(version=self._version, probe=own.logprobs.tolist(), num_cached=0, canary_gap=0.0)

    def _accept(self, version: str) -> Any:
        return self._at_once(version=version)
