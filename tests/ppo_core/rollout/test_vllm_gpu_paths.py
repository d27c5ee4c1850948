"""vLLM's ways on a GPU, as far as they can be seen without one: weights in parts by handle, sleep, order of calls."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ppo_core.errors import RolloutError, WeightSyncError
from ppo_core.rollout.cuda_ipc import CudaIPCWeights, Handles
from ppo_core.rollout.vllm_engine import VLLMEngine
from ppo_core.rollout.vllm_settings import CUDA_IPC
from ppo_core.rollout.weights import PolicyWeights, probe_of
from tests.ppo_core.rollout.engine_contract import PROMPTS, SEEDS, TOLERANCE, contract_policy, said_by
from tests.ppo_core.rollout.vllm_engines import CALLS_FILE, moved, started_engine, synced, vllm_config
from tests.ppo_core.rollout.vllm_gpu_like import exported_memory, shared_buffer

pytestmark = pytest.mark.engines

# Less than the embeddings, more than most other weights.
BUFFER_BYTES = 20_000


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VLLMEngine, Path]]:
    folder = tmp_path_factory.mktemp("engine")
    calls = folder / "calls"
    os.environ[CALLS_FILE] = str(calls)
    engine = started_engine(
        contract_policy(),
        folder,
        vllm_config(),
        transfer=CUDA_IPC,
        extension="tests.ppo_core.rollout.vllm_gpu_like.GpuLikeReceiver",
    )
    del os.environ[CALLS_FILE]
    engine._sleeps = True
    yield engine, calls
    engine.close()


@pytest.fixture
def engine(started: tuple[VLLMEngine, Path]) -> VLLMEngine:
    engine, _ = started
    engine._transferred = lambda pairs: CudaIPCWeights(  # type: ignore[method-assign]
        pairs, torch.device("cpu"), BUFFER_BYTES, shared_buffer, exported_memory
    )
    return engine


def test_weights_come_in_parts_and_it_sleeps_between(
    started: tuple[VLLMEngine, Path], engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, calls = contract_policy(), started[1]

    def empty_cache() -> None:
        with calls.open("a") as file:
            file.write("the trainer's torch gives back what it holds unused\n")

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    first = synced(engine, policy, 1).generate(PROMPTS, seeds=SEEDS)
    calls.write_text("")
    engine.rest()
    moved(policy)
    synced(engine, policy, 2)
    again = engine.generate(PROMPTS, seeds=SEEDS)
    assert [one.ids for one in again] != [one.ids for one in first]
    for prompt, one in zip(PROMPTS, again, strict=True):
        assert torch.tensor(one.logprobs) == pytest.approx(said_by(policy, prompt, one, 1.0), abs=TOLERANCE)
    told = calls.read_text().splitlines()
    num_parts = told.count("update_weights")
    assert num_parts > 3
    assert told == [
        "sleep 2",
        "the trainer's torch gives back what it holds unused",
        "wake ['weights']",
        "start_weight_update",
        *["update_weights"] * num_parts,
        "finish_weight_update",
        "wake ['kv_cache']",
    ]


def test_nothing_is_generated_while_it_sleeps(engine: VLLMEngine) -> None:
    policy = contract_policy()
    synced(engine, policy, 3)
    engine.rest()
    with pytest.raises(WeightSyncError, match="asked for policy version 3, but the engine holds '3', verified is None"):
        engine.generate(PROMPTS, seeds=SEEDS)
    assert len(synced(engine, policy, 4).generate(PROMPTS, seeds=SEEDS)) == len(PROMPTS)


def test_a_part_that_does_not_arrive_fails_the_sync_and_the_next_one_mends_it(engine: VLLMEngine) -> None:
    policy = contract_policy()
    whole = engine._transferred

    def exported_elsewhere(buffer: torch.Tensor) -> Handles:
        (handle,) = exported_memory(buffer).values()
        return {"GPU-of-another": handle}

    engine._transferred = lambda pairs: CudaIPCWeights(  # type: ignore[method-assign]
        pairs, torch.device("cpu"), BUFFER_BYTES, shared_buffer, exported_elsewhere
    )
    seen: list[str] = []

    class Watched(PolicyWeights):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for pair in super().__iter__():
                yield pair
                seen.append(pair[0])

    with pytest.raises(RolloutError, match="IPC handle not found for GPU UUID GPU-of-a-test"):
        engine.sync_weights(Watched(policy), probe_of(policy), 5)
    assert seen == [name for name, _ in PolicyWeights(policy)]  # Other ranks may be waiting for each of them.
    with pytest.raises(WeightSyncError, match="verified is None"):
        engine.generate(PROMPTS, seeds=SEEDS)
    engine._transferred = whole  # type: ignore[method-assign]
    assert len(synced(engine, policy, 6).generate(PROMPTS, seeds=SEEDS)) == len(PROMPTS)
