"""The servers of a run together: made of the spec's addresses, of one way on which weights come, in one NCCL group."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from ppo_core.errors import DataError
from ppo_core.rollout.nccl_weights import NCCLGroup
from ppo_core.rollout.vllm_replica import Message, Replica, answers
from ppo_core.rollout.vllm_service import VLLMService
from ppo_core.rollout.vllm_settings import NCCL
from ppo_core.spec.groups import RolloutConfig


def services(config: RolloutConfig, tokenizer: Any) -> list[Replica]:
    """Of each address of `rollout.vllm.servers`; not spoken to yet.

    Raises:
        DataError: a host is not allowed.
    """
    options = config.vllm
    made: list[Replica] = []
    try:
        for url in options.servers:
            made.append(
                VLLMService(
                    f"vLLM server {url}",
                    url,
                    os.environ,
                    timeout_s=options.timeout_s,
                    max_rows=options.max_rows,
                    tokenizer=tokenizer,
                )
            )
    except BaseException:
        for one in made:
            one.kill()
        raise
    return made


def common_way(started: Sequence[Message], device: torch.device) -> str:
    """The one way on which all servers, as they said at the start, take weights in.

    Raises:
        DataError: they differ, or the trainer on `device` cannot send by it.
    """
    ways = sorted({str(server["transfer"]) for server in started})
    if len(ways) > 1:
        raise DataError(f"the servers take weights by different ways: {', '.join(ways)}", hint="Start them alike.")
    if ways[0] == NCCL and device.type != "cuda":
        raise DataError(
            "the servers take weights by NCCL, from a GPU to theirs, but the trainer has none",
            hint="Set resources.gpus, or start the servers on a processor beside the trainer.",
        )
    return ways[0]


def met_by_nccl(
    replicas: Sequence[Replica], started: Sequence[Message], device: torch.device, timeout_s: float
) -> NCCLGroup:
    """The trainer and the workers of all servers in one group.

    Raises:
        EngineTimeoutError: they did not all come in time.
        RolloutError: a server could not.
    """
    counts = [int(server["world_size"]) for server in started]
    group = NCCLGroup(device, sum(counts), timeout_s)
    invited = zip(replicas, group.invitations(counts), strict=True)
    waited_for = [(server, server.ask("meet", invitation=invitation)) for server, invitation in invited]

    def look() -> None:
        waited_for[:] = [(server, call) for server, call in waited_for if server.answer(call, 0) is None]

    group.meet(look)
    answers(waited_for)
    return group
