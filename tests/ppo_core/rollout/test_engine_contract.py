"""The contract of rollout engines, kept by the scripted and the transformers engine."""

from __future__ import annotations

from ppo_core.rollout.engine import RolloutEngine
from ppo_core.rollout.transformers_engine import TransformersEngine
from ppo_core.spec.groups import RolloutConfig
from tests.ppo_core.rollout.engine_contract import END, EngineContract, SamplingContract, contract_policy
from tests.ppo_core.rollout.scripted_engine import ScriptedEngine, response
from tests.ppo_core.tiny_models import tiny_tokenizer


class TestScripted(EngineContract):
    policy = contract_policy()

    def make(self, config: RolloutConfig) -> RolloutEngine:
        whole = [130] * config.max_new_tokens
        script = [response([*whole[:2], END][-config.max_new_tokens :]), response(whole, "length")]
        return ScriptedEngine(script, version=4)


class TestTransformers(SamplingContract):
    policy = contract_policy()

    def make(self, config: RolloutConfig) -> RolloutEngine:
        return TransformersEngine(self.policy, tiny_tokenizer(), config, version=4)
