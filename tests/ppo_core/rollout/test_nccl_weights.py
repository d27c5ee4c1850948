"""Weights to servers by NCCL, as far as that can be seen without a GPU: vLLM's own transfer engine takes them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ppo_core.errors import DataError, EngineLostError, EngineTimeoutError, RolloutError
from ppo_core.rollout import nccl_weights, vllm_engine
from ppo_core.rollout.nccl_weights import NCCLGroup
from ppo_core.rollout.vllm_engine import VLLMEngine
from ppo_core.rollout.vllm_servers import common_way
from ppo_core.rollout.vllm_settings import CUDA_IPC, NCCL
from ppo_core.rollout.weights import PolicyWeights, probe_of, weights_digest
from ppo_core.spec.engines import VLLMConfig
from tests.ppo_core.rollout.engine_contract import contract_policy, rollout_config
from tests.ppo_core.rollout.nccl_like import NCCLServer, put_in_place
from tests.ppo_core.rollout.vllm_engines import moved, started_engine, synced

pytestmark = pytest.mark.engines

Make = Callable[[], VLLMEngine]


@pytest.fixture
def servers() -> list[NCCLServer]:
    """Of two workers that share a model out, and of one."""
    return [NCCLServer(f"vLLM server {place}", place, contract_policy()) for place in (2, 1)]


@pytest.fixture
def make(servers: list[NCCLServer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Make:
    put_in_place(monkeypatch)
    monkeypatch.setattr(vllm_engine, "services", lambda config, tokenizer: servers)
    monkeypatch.setattr(vllm_engine, "common_way", lambda started, device: common_way(started, torch.device("cuda")))
    config = rollout_config(engine="vllm", vllm=VLLMConfig(servers=["http://a", "http://b"], timeout_s=2.0))
    return lambda: started_engine(contract_policy(), tmp_path, config)


def test_every_worker_of_every_server_gets_the_weights_that_the_trainer_has(
    make: Make, servers: list[NCCLServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_weights.NCCLWeights.__init__, "__defaults__", (20_000,))
    engine, policy = make(), contract_policy()
    assert engine.transfer == NCCL
    synced(engine, policy, 1)
    assert servers[0].num_updates > 6  # in parts, twice
    report = engine.sync_weights(PolicyWeights(moved(policy)), probe_of(policy), 2)
    assert report.digest == weights_digest(PolicyWeights(policy))
    assert report.probe_gap < 1e-5
    for model in (model for server in servers for model in server.models):
        assert weights_digest(model.pairs.items()) == report.digest


def test_a_server_that_cannot_come_is_heard_of_at_once(make: Make, servers: list[NCCLServer]) -> None:
    servers[1].refuses_to_meet = True
    began = time.monotonic()
    with pytest.raises(RolloutError, match="vLLM server 1: NCCL finds no network"):
        make()
    assert time.monotonic() - began < 1.5


def test_workers_that_do_not_come_are_not_waited_for_beyond_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place(monkeypatch)
    group = NCCLGroup(torch.device("cpu"), 3, timeout_s=0.5)
    with pytest.raises(EngineTimeoutError, match=r"the 3 workers of the vLLM servers did not meet .* within 0\.5 s"):
        group.meet(lambda: None)


def test_a_server_that_dies_within_a_part_is_named_at_once(make: Make, servers: list[NCCLServer]) -> None:
    engine, policy = make(), contract_policy()
    synced(engine, policy, 1)
    servers[0].dies = True
    began = time.monotonic()
    with pytest.raises(EngineLostError, match="vLLM server 2 is gone"):
        synced(engine, policy, 2)
    assert time.monotonic() - began < 2


def test_a_trainer_without_a_gpu_and_servers_of_different_ways_are_refused() -> None:
    by_nccl, by_ipc = {"transfer": NCCL}, {"transfer": CUDA_IPC}
    with pytest.raises(DataError, match="from a GPU to theirs, but the trainer has none"):
        common_way([by_nccl, by_nccl], torch.device("cpu"))
    with pytest.raises(DataError, match="by different ways: ipc, nccl"):
        common_way([by_nccl, by_ipc], torch.device("cuda"))
