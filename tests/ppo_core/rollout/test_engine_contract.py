"""What every rollout engine must do; run against the scripted one and the real one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ppo_core.errors import RolloutError
from ppo_core.models.policy import PolicyModel
from ppo_core.rollout.engine import RolloutEngine
from ppo_core.rollout.transformers_engine import TransformersEngine
from ppo_core.rollout.weights import PolicyWeights, probe_of, weights_digest
from ppo_core.spec.groups import RolloutConfig
from tests.ppo_core.rollout.scripted_engine import ScriptedEngine, response
from tests.ppo_core.tiny_models import VOCABULARY, tiny_model, tiny_tokenizer

PROMPTS = [[1, 5, 9], [1, 7], [1, 5, 9, 13, 17]]
SEEDS = [11, 12, 13]

Made = tuple[RolloutEngine, PolicyModel]


def scripted() -> Made:
    script = [response([7, 8, 2]), response([], "length"), response([9, 9, 9, 9, 9, 9], "length")]
    return ScriptedEngine(script, version=4), PolicyModel(tiny_model())


def transformers() -> Made:
    policy = PolicyModel(tiny_model())
    return TransformersEngine(policy, tiny_tokenizer(), RolloutConfig(max_new_tokens=6), version=4), policy


@pytest.fixture(params=[scripted, transformers], ids=["scripted", "transformers"])
def made(request: pytest.FixtureRequest) -> Made:
    make: Callable[[], Made] = request.param
    return make()


def test_there_is_one_response_a_prompt_in_known_terms(made: Made) -> None:
    responses = made[0].generate(PROMPTS, seeds=SEEDS)
    assert len(responses) == 3
    for one in responses:
        assert one.finish_reason in ("stop", "length")
        assert len(one.ids) <= 6
        assert len(one.logprobs) == len(one.ids)
        assert all(isinstance(token, int) and 0 <= token < VOCABULARY for token in one.ids)
        assert all(logprob <= 0 for logprob in one.logprobs)


def test_what_check_raises_ends_the_generation(made: Made) -> None:
    class Stop(Exception):
        pass

    def check() -> None:
        raise Stop

    with pytest.raises(Stop):
        made[0].generate(PROMPTS, seeds=SEEDS, check=check)


def test_every_row_needs_a_seed_and_a_token(made: Made) -> None:
    with pytest.raises(RolloutError, match="3 prompts but 2 seeds"):
        made[0].generate(PROMPTS, seeds=[1, 2])
    with pytest.raises(RolloutError, match="no token"):
        made[0].generate([[1], []], seeds=[1, 2])


def test_the_version_is_that_of_the_last_sync(made: Made) -> None:
    engine, policy = made
    assert engine.version == 4
    report = engine.sync_weights(PolicyWeights(policy), probe_of(policy), 5)
    assert engine.version == report.version == 5
    assert report.digest == weights_digest(PolicyWeights(policy))
