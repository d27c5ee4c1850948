"""The real vLLM on a processor keeps the contract of rollout engines, and says what the transformers engine says."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from ppo_core.errors import WeightSyncError
from ppo_core.rollout.engine import RolloutEngine
from ppo_core.rollout.transformers_engine import TransformersEngine
from ppo_core.rollout.vllm_engine import VLLMEngine
from ppo_core.spec.groups import RolloutConfig
from tests.ppo_core.rollout.engine_contract import PROMPTS, SEEDS, SamplingContract, contract_policy, rollout_config
from tests.ppo_core.rollout.vllm_engines import group_of, started_engine, synced, vllm_config
from tests.ppo_core.tiny_models import tiny_tokenizer

pytestmark = pytest.mark.engines

# Room in the engine's context for what the tests ask for.
LONGEST = vllm_config(max_new_tokens=48)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMEngine]:
    logs = tmp_path_factory.mktemp("logs")
    made = started_engine(contract_policy(), logs, LONGEST)
    yield made
    pids = [member for pid in made.pids for member in group_of(pid)]
    assert pids
    assert made._folder is not None
    folder = made._folder.path
    assert folder.exists()
    made.close()
    made.close()
    assert not folder.exists()
    assert not [member for pid in made.pids for member in group_of(pid)]


def configured(engine: VLLMEngine, config: RolloutConfig) -> VLLMEngine:
    """The same processes under other settings of sampling: they are sent with every request."""
    engine._config = vllm_config(**config.model_dump(exclude={"engine", "vllm"}))
    engine._stop_ids = [2, *config.stop_ids]
    return engine


class TestContract(SamplingContract):
    policy = contract_policy()

    @pytest.fixture(autouse=True)
    def _take(self, engine: VLLMEngine) -> None:
        self.engine = engine

    def make(self, config: RolloutConfig) -> RolloutEngine:
        return synced(configured(self.engine, config), self.policy)


def test_before_the_first_sync_nothing_is_generated(
    tmp_path_factory: pytest.TempPathFactory, engine: VLLMEngine
) -> None:
    version, engine._version = engine.version, -1
    with pytest.raises(WeightSyncError, match="asked for policy version -1"):
        engine.generate(PROMPTS, seeds=SEEDS)
    engine._version = version


def test_greedy_responses_are_those_of_the_transformers_engine(engine: VLLMEngine) -> None:
    policy = contract_policy()
    with torch.no_grad():  # Wide apart: at the lowest temperature nothing is left to chance.
        policy.model.get_input_embeddings().weight.mul_(50)
    config = rollout_config(temperature=0.01, max_new_tokens=24)
    prompts = [
        [1, *torch.randint(3, 300, (3 + row,), generator=torch.Generator().manual_seed(row)).tolist()]
        for row in range(16)
    ]
    seeds = list(range(16))
    theirs = TransformersEngine(policy, tiny_tokenizer(), config).generate(prompts, seeds=seeds)
    ours = synced(configured(engine, config), policy).generate(prompts, seeds=seeds)
    assert min(min(one.logprobs) for one in theirs) > -0.05
    assert [one.ids for one in ours] == [one.ids for one in theirs]
    assert [one.finish_reason for one in ours] == [one.finish_reason for one in theirs]


def test_a_stop_in_mid_generation_is_honoured_at_once(engine: VLLMEngine) -> None:
    class Stop(Exception):
        pass

    began = time.monotonic()

    def check() -> None:
        if time.monotonic() - began > 0.2:
            raise Stop

    synced(configured(engine, rollout_config(max_new_tokens=48)), contract_policy())
    with pytest.raises(Stop):
        engine.generate(PROMPTS * 200, seeds=list(range(800)), check=check)
    assert time.monotonic() - began < 2
    again = engine.generate(PROMPTS, seeds=SEEDS)
    assert [len(one.ids) > 0 for one in again] == [True] * 4
