"""Faults in the real engine's process: each is caught, by name, in the iteration in which it happens."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ppo_core.errors import EngineTimeoutError, RolloutError, WeightSyncError
from ppo_core.main import run_segment
from ppo_core.rollout.engine import Response, SyncReport
from ppo_core.rollout.vllm_engine import VLLMEngine
from ppo_core.rollout.vllm_process import VLLMProcess
from ppo_core.rollout.weights import PolicyWeights, Probe, probe_of
from ppo_core.rundir import ExitCode
from tests.ppo_core.rollout.engine_contract import PROMPTS, SEEDS, contract_policy
from tests.ppo_core.rollout.vllm_engines import FAULT_FILE, moved, started_engine, synced, vllm_config
from tests.ppo_core.tiny_models import tiny_model
from tests.ppo_core.toy_run import TOKENS, journal, make_toy, toy_segment

pytestmark = pytest.mark.engines

PUT_INTO_SYNC = {
    "ignores": r"logprobs of the probe by vLLM engine 0 differ from the trainer's",
    "half": r"of the model's own did not arrive whole",
    "all but one part": r"1 of the model's own did not arrive whole, model\.layers\.1\.self_attn\.qkv_proj\.weight",
    "names swapped": r"logprobs of the probe by vLLM engine 0 differ from the trainer's",
    "stale prefix": r"still reads 32 tokens of its prefix cache",
    "wrong bits": r"sent weights of digest [0-9a-f]{64}, vLLM engine 0 received [0-9a-f]{64}",
}
PUT_INTO_ROLLOUT = {
    "answers in another order": r"its responses are in another order",
    "rows in another order": r"its responses are not those of their rows",
}


class Faults:
    """The engine, and what goes wrong in its process."""

    def __init__(self, engine: VLLMEngine, file: Path) -> None:
        self.engine = engine
        self._file = file

    def put_in(self, fault: str) -> None:
        self._file.write_text(fault)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faults]:
    folder = tmp_path_factory.mktemp("engine")
    os.environ[FAULT_FILE] = str(folder / "fault")
    engine = started_engine(
        contract_policy(),
        folder,
        vllm_config(max_new_tokens=8),
        extension="tests.ppo_core.rollout.vllm_faults.FaultyReceiver",
    )
    del os.environ[FAULT_FILE]
    yield Faults(engine, folder / "fault")
    engine.close()


@pytest.fixture
def faults(started: Faults) -> Iterator[Faults]:
    started.put_in("")
    yield started
    started.put_in("")


@pytest.mark.parametrize(("fault", "message"), PUT_INTO_SYNC.items())
def test_a_sync_that_went_wrong_is_caught_and_nothing_is_generated_after_it(
    faults: Faults, fault: str, message: str
) -> None:
    policy, engine = contract_policy(), faults.engine
    synced(engine, policy, 1)
    faults.put_in(fault)
    moved(policy)
    with pytest.raises(WeightSyncError, match=message):
        engine.sync_weights(PolicyWeights(policy), probe_of(policy), 2)
    with pytest.raises(WeightSyncError, match="asked for policy version 1, but the engine holds"):
        engine.generate(PROMPTS, seeds=SEEDS)
    faults.put_in("")
    assert synced(engine, policy, 3).version == 3
    assert len(engine.generate(PROMPTS, seeds=SEEDS)) == len(PROMPTS)


@pytest.mark.parametrize(("fault", "message"), PUT_INTO_ROLLOUT.items())
def test_responses_in_another_order_are_caught(faults: Faults, fault: str, message: str) -> None:
    policy, engine = contract_policy(), faults.engine
    faults.put_in(fault)
    synced(engine, policy, 1)
    with pytest.raises(RolloutError, match=message):
        engine.generate(PROMPTS, seeds=SEEDS)


def test_out_of_memory_halves_what_is_generated_at_once_and_changes_no_response(faults: Faults) -> None:
    policy, engine = contract_policy(), faults.engine
    prompts, seeds = PROMPTS * 4, list(range(16))
    expected = synced(engine, policy, 1).generate(prompts, seeds=seeds)
    faults.put_in("out of memory")
    found = synced(engine, policy, 2).generate(prompts, seeds=seeds)
    assert [one.ids for one in found] == [one.ids for one in expected]


class Shared:
    """The module's engine in a run's trainer: it outlives the run. `before` is told of every sync's version."""

    def __init__(self, engine: VLLMEngine, before: Callable[[int], None]) -> None:
        self._engine = engine
        self._before = before

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def rows_at_once(self) -> int | None:
        return self._engine.rows_at_once

    def generate(self, prompt_ids: list[list[int]], **more: Any) -> list[Response]:
        return self._engine.generate(prompt_ids, **more)

    def sync_weights(self, weights: PolicyWeights, probe: Probe, version: int) -> SyncReport:
        self._before(version)
        return self._engine.sync_weights(weights, probe, version)

    def rest(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("toy")
    made = make_toy(folder)
    policy = tiny_model("llama", vocab_size=TOKENS, head_dim=32, max_position_embeddings=128, initializer_range=0.05)
    policy.save_pretrained(folder / "policy")
    return {**made, "iterations": 4, "data": {**made["data"], "held_out": None}}


@pytest.mark.parametrize("fault", ["ignores", "half", "stale prefix", "answers in another order"])
def test_a_run_ends_in_the_iteration_of_the_fault(
    faults: Faults, toy: dict[str, Any], tmp_path: Path, fault: str
) -> None:
    in_sync = fault in PUT_INTO_SYNC
    iteration = 3

    def before(version: int) -> None:
        if version == (iteration if in_sync else iteration - 1):
            faults.put_in(fault)

    def change(trainer: Any) -> None:
        engine = Shared(faults.engine, before)
        engine.sync_weights(trainer.models.trainer.weights(), trainer.models.trainer.probe(), 0)
        trainer.models = replace(trainer.models, engine=engine)

    segment = toy_segment(tmp_path, toy)
    assert run_segment(segment, token=1, attempt=1, change=change) == ExitCode.FAULT
    (end,) = journal(segment, "end")
    assert end.payload["error"]["code"] == ("weight_sync" if in_sync else "rollout")
    assert max(event.iteration for event in journal(segment, "metrics")) == iteration - 1


def test_an_engine_that_steps_and_makes_no_token_is_killed_at_the_deadline(faults: Faults) -> None:
    """The last one with this engine."""
    policy = contract_policy()
    synced(faults.engine, policy, 1)
    faults.put_in("no token")
    synced(faults.engine, policy, 2)
    (process,) = faults.engine._replicas
    assert isinstance(process, VLLMProcess)
    process._timeout_s = 3.0
    began = time.monotonic()

    def check() -> None:
        assert time.monotonic() - began < 20, "it waits for ever"

    with pytest.raises(EngineTimeoutError, match=r"vLLM engine 0 .* did not answer within 3 s and was killed"):
        faults.engine.generate(PROMPTS, seeds=SEEDS, check=check)
