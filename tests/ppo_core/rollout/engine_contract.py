"""What every rollout engine must do: the tests of each engine have a subclass that says how to make one.

All engines get the same policy; those that sample are compared with what it says itself.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ppo_core.data.prompts import PromptBatch
from ppo_core.errors import RolloutError
from ppo_core.models.policy import PolicyModel
from ppo_core.rollout.batch import assemble
from ppo_core.rollout.engine import Response, RolloutEngine
from ppo_core.rollout.weights import PolicyWeights, probe_of, weights_digest
from ppo_core.spec.groups import RolloutConfig
from tests.ppo_core.tiny_models import tiny_model, tiny_tokenizer

TOKENS = 300
END = 2
PROMPTS = [[1, 5, 9], [1, 7], [1, 5, 9, 13, 17], [1, 100, 101, 102, 103, 104, 105]]
SEEDS = [11, 12, 13, 2**63 - 1]
MAX_NEW_TOKENS = 12
# Of one engine and the other's own pass, float32, nats.
TOLERANCE = 1e-4


def contract_policy() -> PolicyModel:
    """Heads of 32 dimensions, the smallest that vLLM's attention takes; distributions far from flat."""
    return PolicyModel(tiny_model("llama", vocab_size=TOKENS, head_dim=32, max_position_embeddings=128))


def rollout_config(**changes: Any) -> RolloutConfig:
    return RolloutConfig(**{"max_new_tokens": MAX_NEW_TOKENS, **changes})


def said_by(policy: PolicyModel, prompt: list[int], response: Response, temperature: float) -> torch.Tensor:
    """[tokens]: the policy's own logprobs of a response."""
    ids = torch.tensor([prompt + response.ids])
    mask = torch.arange(1, ids.shape[1]).unsqueeze(0) >= len(prompt)
    with torch.no_grad():
        return policy.logprobs(ids, torch.ones_like(ids), mask, temperature=temperature)[mask]


class EngineContract:
    """`make` gives an engine with these settings that holds `policy` as version 4."""

    policy: PolicyModel

    def make(self, config: RolloutConfig) -> RolloutEngine:
        raise NotImplementedError

    def test_there_is_one_response_a_prompt_in_known_terms(self) -> None:
        responses = self.make(rollout_config()).generate(PROMPTS, seeds=SEEDS)
        assert len(responses) == len(PROMPTS)
        for one in responses:
            assert one.finish_reason in ("stop", "length")
            assert len(one.logprobs) == len(one.ids) <= MAX_NEW_TOKENS
            assert all(isinstance(token, int) and 0 <= token < TOKENS for token in one.ids)
            assert all(isinstance(logprob, float) and logprob <= 0 for logprob in one.logprobs)

    def test_what_ends_a_response_stays_in_it_and_nothing_follows(self) -> None:
        config = rollout_config(stop_ids=list(range(3, 66)))
        ends = {END, *config.stop_ids}
        responses = self.make(config).generate(PROMPTS, seeds=SEEDS)
        assert any(one.finish_reason == "stop" for one in responses)
        for one in responses:
            assert not ends & set(one.ids[:-1])
            assert (one.ids[-1] in ends) == (one.finish_reason == "stop")
            assert one.finish_reason == "stop" or len(one.ids) == MAX_NEW_TOKENS

    def test_a_response_that_is_cut_off_says_so(self) -> None:
        responses = self.make(rollout_config(max_new_tokens=1)).generate(PROMPTS, seeds=SEEDS)
        assert [len(one.ids) for one in responses] == [1] * len(PROMPTS)
        assert [one.finish_reason for one in responses] == [
            "stop" if one.ids == [END] else "length" for one in responses
        ]

    def test_responses_fit_into_a_rollout(self) -> None:
        prompts = PromptBatch(PROMPTS, [str(ids) for ids in PROMPTS], list(range(len(PROMPTS))))
        responses = self.make(rollout_config()).generate(PROMPTS, seeds=SEEDS)
        rollout = assemble(prompts, responses, pad_id=0, decode=str, policy_version=4)
        assert [rollout.response_ids(row) for row in range(len(PROMPTS))] == [one.ids for one in responses]

    def test_what_check_raises_ends_the_generation_and_the_engine_goes_on(self) -> None:
        class Stop(Exception):
            pass

        def check() -> None:
            raise Stop

        engine = self.make(rollout_config())
        with pytest.raises(Stop):
            engine.generate(PROMPTS, seeds=SEEDS, check=check)
        assert len(engine.generate(PROMPTS, seeds=SEEDS)) == len(PROMPTS)

    def test_every_row_needs_a_seed_and_a_token(self) -> None:
        engine = self.make(rollout_config())
        with pytest.raises(RolloutError, match="3 prompts but 2 seeds"):
            engine.generate(PROMPTS[:3], seeds=[1, 2])
        with pytest.raises(RolloutError, match="no token"):
            engine.generate([[1], []], seeds=[1, 2])

    def test_after_a_rest_and_a_sync_it_goes_on(self) -> None:
        engine = self.make(rollout_config())
        engine.rest()
        engine.sync_weights(PolicyWeights(self.policy), probe_of(self.policy), 5)
        assert len(engine.generate(PROMPTS, seeds=SEEDS)) == len(PROMPTS)

    def test_the_version_is_that_of_the_last_sync(self) -> None:
        engine = self.make(rollout_config())
        assert engine.version == 4
        report = engine.sync_weights(PolicyWeights(self.policy), probe_of(self.policy), 5)
        assert engine.version == report.version == 5
        assert report.digest == weights_digest(PolicyWeights(self.policy))


class SamplingContract(EngineContract):
    """What an engine that samples must do, besides."""

    def test_seeds_decide(self) -> None:
        engine = self.make(rollout_config())
        first = engine.generate(PROMPTS, seeds=SEEDS)
        assert engine.generate(PROMPTS, seeds=SEEDS) == first
        other = engine.generate(PROMPTS, seeds=[seed // 2 + 5 for seed in SEEDS])
        assert all(a.ids != b.ids for a, b in zip(first, other, strict=True))
        same_prompts = engine.generate([PROMPTS[0]] * 4, seeds=[1, 2, 2**40 + 1, 1])
        assert same_prompts[0] == same_prompts[3]
        assert len({tuple(one.ids) for one in same_prompts}) == 3

    def test_a_row_does_not_depend_on_the_rows_beside_it(self) -> None:
        engine = self.make(rollout_config())
        together = engine.generate(PROMPTS, seeds=SEEDS)
        order = [2, 0, 3, 1]
        shuffled = engine.generate([PROMPTS[row] for row in order], seeds=[SEEDS[row] for row in order])
        assert [one.ids for one in shuffled] == [together[row].ids for row in order]
        alone = [engine.generate([ids], seeds=[seed])[0] for ids, seed in zip(PROMPTS, SEEDS, strict=True)]
        assert [one.ids for one in alone] == [one.ids for one in together]

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
    def test_logprobs_are_of_the_distribution_that_is_sampled(self, temperature: float) -> None:
        responses = self.make(rollout_config(temperature=temperature)).generate(PROMPTS, seeds=SEEDS)
        for prompt, one in zip(PROMPTS, responses, strict=True):
            expected = said_by(self.policy, prompt, one, temperature)
            assert torch.tensor(one.logprobs) == pytest.approx(expected, abs=TOLERANCE)

    def test_a_low_temperature_draws_the_likeliest_token(self) -> None:
        responses = self.make(rollout_config(temperature=0.01)).generate(PROMPTS, seeds=SEEDS)
        num_sure = num_tokens = 0
        for prompt, one in zip(PROMPTS, responses, strict=True):
            for token, likeliest, logprob in zip(one.ids, self.likeliest(prompt, one), one.logprobs, strict=True):
                assert token == likeliest or logprob < -0.1
                num_sure += logprob > -0.1
                num_tokens += 1
        assert num_sure > 0.8 * num_tokens

    def test_a_stop_string_ends_a_response_at_the_token_in_which_it_appears(self) -> None:
        config = rollout_config(stop_strings=["e", "a", " i", "Y", "7", "3", "§"])
        tokenizer = tiny_tokenizer()
        responses = self.make(config).generate(PROMPTS * 4, seeds=list(range(16)))
        reasons = set()
        for one in responses:
            before, whole = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (one.ids[:-1], one.ids))
            assert not any(text in before for text in config.stop_strings)
            ends = one.ids[-1] == END or any(text in whole for text in config.stop_strings)
            assert ends == (one.finish_reason == "stop")
            reasons.add((one.finish_reason, one.ids[-1] == END))
        assert ("stop", False) in reasons

    def likeliest(self, prompt: list[int], response: Response) -> list[int]:
        """The policy's likeliest token where each token of a response stands."""
        ids = torch.tensor([prompt + response.ids])
        with torch.no_grad():
            found: list[int] = self.policy.model(ids).logits[0, len(prompt) - 1 : -1].argmax(dim=-1).tolist()
        return found
