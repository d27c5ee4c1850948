"""The transformers engine: exact sampling, rows that do not know each other, stops of every kind, verified syncs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ppo_core.errors import DataError, RolloutError, WeightSyncError
from ppo_core.models.loading import load_policy
from ppo_core.models.policy import PolicyModel
from ppo_core.rollout import transformers_engine
from ppo_core.rollout.engine import Response
from ppo_core.rollout.transformers_engine import TransformersEngine, stop_ids_of
from ppo_core.rollout.weights import PolicyWeights, probe_of, weights_digest
from ppo_core.seeds import derived_seed
from ppo_core.spec.groups import PolicyConfig, RolloutConfig
from tests.ppo_core.tiny_models import FAMILIES, VOCABULARY, tiny_model, tiny_tokenizer

# Left padding of every width up to 8, and rows longer than the sliding windows of the tiny models.
PROMPTS = [[1] + [5 + (3 * row + column) % 50 for column in range(1 + row % 9)] for row in range(20)]
SEEDS = list(range(100, 120))


def engine(family: str = "llama", policy: PolicyModel | None = None, **settings: Any) -> TransformersEngine:
    policy = policy or PolicyModel(tiny_model(family))
    return TransformersEngine(policy, tiny_tokenizer(), RolloutConfig(**{"max_new_tokens": 12, **settings}))


def always(policy: PolicyModel, token: int) -> PolicyModel:
    """The policy, changed to say `token` whatever it reads."""
    with torch.no_grad():
        head = policy.model.get_output_embeddings()
        replaced = nn.Linear(head.weight.shape[1], head.weight.shape[0])
        replaced.weight.zero_()
        replaced.bias.zero_()
        replaced.bias[token] = 100.0
    policy.model.set_output_embeddings(replaced)
    return policy


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engines_logprobs_are_the_trainers(family: str) -> None:
    """Cache, left padding, dropped rows and positions are right when one pass over each row says the same."""
    made = engine(family, temperature=0.7, stop_ids=[3, 4, 8, 9])
    responses = made.generate(PROMPTS, seeds=SEEDS)
    assert len({len(one.ids) for one in responses}) > 3
    for prompt, one in zip(PROMPTS, responses, strict=True):
        ids = torch.tensor([prompt + one.ids])
        mask = torch.arange(1, ids.shape[1]).unsqueeze(0) >= len(prompt)
        logprobs = made._policy.logprobs(ids, torch.ones_like(ids), mask, temperature=0.7)[mask]
        torch.testing.assert_close(torch.tensor(one.logprobs), logprobs.detach(), atol=1e-4, rtol=1e-4)


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    made = engine(stop_ids=[3, 4, 8, 9])
    together = made.generate(PROMPTS, seeds=SEEDS)
    alone = [made.generate([prompt], seeds=[seed])[0] for prompt, seed in zip(PROMPTS, SEEDS, strict=True)]
    backwards = made.generate(PROMPTS[::-1], seeds=SEEDS[::-1])[::-1]
    assert [one.ids for one in alone] == [one.ids for one in together] == [one.ids for one in backwards]


def test_seeds_decide_and_nothing_else() -> None:
    """T39: verl-project/verl#5179, every replica returned the same answers."""
    made = engine()
    prompt = [PROMPTS[3]] * 8
    first = [one.ids for one in made.generate(prompt, seeds=list(range(8)))]
    torch.manual_seed(99)
    assert [one.ids for one in engine().generate(prompt, seeds=list(range(8)))] == first
    assert len({tuple(ids) for ids in first}) == 8
    assert [one.ids for one in made.generate(prompt, seeds=list(range(8, 16)))] != first


def test_two_engines_with_seeds_of_their_rows_do_not_answer_alike() -> None:
    """T39: verl-project/verl#5179. Two replicas share one prompt's rows, and say what one engine says of them all."""
    rows, seeds = [PROMPTS[3]] * 4, [derived_seed(1, "rollout", 1, row) for row in range(8)]
    one, other = (engine(max_new_tokens=8).generate(rows, seeds=some) for some in (seeds[:4], seeds[4:]))
    answers = [each.ids for each in (*one, *other)]
    assert len({tuple(ids) for ids in answers}) == 8
    assert answers == [each.ids for each in engine(max_new_tokens=8).generate(rows * 2, seeds=seeds)]


def test_global_random_state_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    engine().generate(PROMPTS, seeds=SEEDS)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_end_of_text_is_kept_and_ends_the_row() -> None:
    made = engine(policy=always(PolicyModel(tiny_model()), 2))
    assert made.generate([[1, 5]], seeds=[1]) == [Response([2], "stop", [0.0])]


def test_an_end_at_the_last_step_is_a_stop() -> None:
    made = engine(policy=always(PolicyModel(tiny_model()), 2), max_new_tokens=1)
    assert made.generate([[1, 5]], seeds=[1])[0].finish_reason == "stop"


def test_a_row_without_an_end_is_cut_off() -> None:
    made = engine(policy=always(PolicyModel(tiny_model()), 7), max_new_tokens=5)
    assert made.generate([[1, 5]], seeds=[1]) == [Response([7] * 5, "length", [0.0] * 5)]


@pytest.mark.parametrize("token", [2, 9])
def test_several_stop_ids(token: int) -> None:
    """T33: huggingface/trl#5338. End ids {2, 9}."""
    made = engine(policy=always(PolicyModel(tiny_model()), token), stop_ids=[9])
    assert made.generate([[1, 5]], seeds=[1])[0].ids == [token]


def test_a_stop_string_over_several_tokens_ends_the_row() -> None:
    tokenizer = tiny_tokenizer()
    (letter,) = tokenizer("q", add_special_tokens=False)["input_ids"]
    model = tiny_model(vocab_size=len(tokenizer))
    made = TransformersEngine(
        always(PolicyModel(model), letter),
        tokenizer,
        RolloutConfig(max_new_tokens=9, stop_strings=["never", "qqq"]),
    )
    assert made.generate([[1, letter]], seeds=[1]) == [Response([letter] * 3, "stop", [0.0] * 3)]


def test_stop_ids_come_from_model_tokenizer_and_spec() -> None:
    policy = PolicyModel(tiny_model(eos_token_id=[2, 6]))
    assert stop_ids_of(policy, tiny_tokenizer(), RolloutConfig(stop_ids=[9])) == [2, 6, 9]


def test_a_policy_that_could_never_end_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="no response could ever end"):
        TransformersEngine(PolicyModel(tiny_model(eos_token_id=None)), tokenizer, RolloutConfig())


def test_generation_defaults_of_the_folder_are_not_used(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    expected = engine(policy=load_policy(PolicyConfig(model=str(tmp_path)))).generate(PROMPTS, seeds=SEEDS)
    defaults = {"temperature": 0.01, "top_k": 1, "max_new_tokens": 2, "min_new_tokens": 2, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(defaults))
    assert engine(policy=load_policy(PolicyConfig(model=str(tmp_path)))).generate(PROMPTS, seeds=SEEDS) == expected


def test_check_is_called_before_every_step() -> None:
    calls: list[int] = []
    engine(policy=always(PolicyModel(tiny_model()), 7)).generate([[1, 5]], seeds=[1], check=lambda: calls.append(1))
    assert len(calls) == 12


def test_out_of_memory_halves_the_chunk_and_changes_no_response(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = engine().generate(PROMPTS, seeds=SEEDS)
    asked: list[int] = []

    class Crowded(transformers_engine._Decoding):
        def __init__(self, policy: PolicyModel, prompt_ids: list[list[int]], max_new_tokens: int) -> None:
            asked.append(len(prompt_ids))
            if len(prompt_ids) > 6:
                raise torch.OutOfMemoryError
            super().__init__(policy, prompt_ids, max_new_tokens)

    monkeypatch.setattr(transformers_engine, "_Decoding", Crowded)
    made = engine()
    assert [one.ids for one in made.generate(PROMPTS, seeds=SEEDS)] == [one.ids for one in expected]
    assert asked == [20, 10, 5, 5, 5, 5]
    made.generate(PROMPTS, seeds=SEEDS)
    assert asked[6:] == [5, 5, 5, 5]


def test_training_mode_is_put_back() -> None:
    policy = PolicyModel(tiny_model())
    policy.model.train()
    engine(policy=policy).generate(PROMPTS, seeds=SEEDS)
    assert policy.model.training


def test_weights_can_be_trained_after_a_generation() -> None:
    policy = PolicyModel(tiny_model())
    engine(policy=policy).generate(PROMPTS, seeds=SEEDS)
    policy.model(input_ids=torch.tensor([[1, 5, 6]])).logits.sum().backward()


def test_the_next_rollout_is_of_the_new_weights() -> None:
    """T35: huggingface/trl#5312."""
    policy = always(PolicyModel(tiny_model()), 3)
    made = engine(policy=policy, max_new_tokens=2)
    assert made.generate([[1, 5]], seeds=[1])[0].ids == [3, 3]
    always(policy, 4)
    made.sync_weights(PolicyWeights(policy), probe_of(policy), 1)
    assert made.generate([[1, 5]], seeds=[1])[0].ids == [4, 4]
    assert made.version == 1


def test_an_engine_with_a_model_of_its_own_takes_over_what_is_sent() -> None:
    policy = PolicyModel(tiny_model())
    made = engine(policy=PolicyModel(tiny_model(seed=5)))
    assert made.sync_weights(PolicyWeights(policy), probe_of(policy), 1).digest == weights_digest(PolicyWeights(policy))
    assert made.generate(PROMPTS, seeds=SEEDS) == engine(policy=policy).generate(PROMPTS, seeds=SEEDS)


def test_other_weights_than_those_sent_are_an_error_with_both_digests() -> None:
    policy, other = PolicyModel(tiny_model()), PolicyModel(tiny_model(num_hidden_layers=3))
    made = engine(policy=other)
    with pytest.raises(WeightSyncError, match=r"sent weights of digest \w{64}, the engine holds \w{64}"):
        made.sync_weights(PolicyWeights(policy), probe_of(policy), 2)
    assert made.version == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_the_probe_agrees(family: str) -> None:
    policy = PolicyModel(tiny_model(family))
    assert engine(family, policy).sync_weights(PolicyWeights(policy), probe_of(policy), 1).probe_gap < 1e-4


def test_a_low_temperature_is_no_stale_weight() -> None:
    """T07's kind: at 0.0001 rounding of 4e-7 would be 0.004 nats, four times what the probe allows."""
    policy = PolicyModel(tiny_model())
    assert (
        engine(policy=policy, temperature=1e-4).sync_weights(PolicyWeights(policy), probe_of(policy), 1).probe_gap
        < 1e-4
    )


def test_wrong_positions_in_the_engine_are_seen_by_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_engine, "position_ids", lambda mask: torch.arange(mask.shape[1]).expand_as(mask))
    policy = PolicyModel(tiny_model("gpt2"))
    with pytest.raises(WeightSyncError, match="logprobs of the probe differ"):
        engine(policy=policy).sync_weights(PolicyWeights(policy), probe_of(policy), 1)


def test_weights_that_are_not_finite_are_an_error() -> None:
    policy = PolicyModel(tiny_model())
    with torch.no_grad():
        next(policy.model.parameters()).fill_(torch.nan)
    with pytest.raises(RolloutError, match="row 0: the policy's logits are not finite"):
        engine(policy=policy).generate(PROMPTS, seeds=SEEDS)
    with pytest.raises(WeightSyncError, match="inf nats"):
        engine(policy=policy).sync_weights(PolicyWeights(policy), probe_of(policy), 1)


LIMITS: list[dict[str, Any]] = [
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_new_tokens": 4},
    {"top_p": 0.9, "top_k": 9, "min_new_tokens": 4},
]


@pytest.mark.parametrize("limits", LIMITS)
def test_with_limits_the_engines_logprobs_are_the_trainers_over_the_same_tokens(limits: dict[str, Any]) -> None:
    """T08. Rows end at different steps, so the sets of rows that left the batch are checked, too."""
    made = engine(temperature=0.7, stop_ids=[3, 4, 8, 9], renormalize=True, **limits)
    responses = made.generate(PROMPTS, seeds=SEEDS)
    assert len({len(one.ids) for one in responses}) > 3
    changed = 0
    for prompt, one in zip(PROMPTS, responses, strict=True):
        ids = torch.tensor([prompt + one.ids])
        mask = torch.arange(1, ids.shape[1]).unsqueeze(0) >= len(prompt)
        assert one.token_sets is not None
        over_all, over_drawable = (
            made._policy.logprobs(ids, torch.ones_like(ids), mask, temperature=0.7, token_sets=sets)[mask].detach()
            for sets in (None, one.token_sets)
        )
        torch.testing.assert_close(torch.tensor(one.logprobs), over_drawable, atol=1e-4, rtol=1e-4)
        changed += int((over_drawable - over_all > 1e-3).sum())
    assert changed > 20


@pytest.mark.parametrize("limits", LIMITS)
def test_with_limits_a_row_does_not_depend_on_the_rows_beside_it(limits: dict[str, Any]) -> None:
    made = engine(stop_ids=[3, 4, 8, 9], renormalize=True, **limits)
    together = made.generate(PROMPTS, seeds=SEEDS)
    alone = [made.generate([prompt], seeds=[seed])[0] for prompt, seed in zip(PROMPTS, SEEDS, strict=True)]
    assert [one.ids for one in alone] == [one.ids for one in together]
    for one, other in zip(alone, together, strict=True):
        assert one.token_sets is not None
        assert other.token_sets is not None
        assert torch.equal(one.token_sets.ids, other.token_sets.ids)
        assert torch.equal(one.token_sets.counts, other.token_sets.counts)


def test_no_response_ends_before_its_shortest_length() -> None:
    """A policy that wants to end at once says its second choice until it may."""
    policy = always(PolicyModel(tiny_model()), 2)
    with torch.no_grad():
        policy.model.get_output_embeddings().bias[7] = 50.0
    (one,) = engine(policy=policy, min_new_tokens=3, renormalize=True).generate([[1, 5]], seeds=[1])
    assert (one.ids, one.finish_reason) == ([7, 7, 7, 2], "stop")
    assert one.logprobs == [0.0] * 4
    assert one.token_sets is not None
    assert one.token_sets.listed == "forbidden"
    assert (one.token_sets.ids.tolist(), one.token_sets.counts.tolist()) == ([2, 2, 2], [1, 1, 1, 0])


def test_a_stop_string_is_looked_for_after_the_shortest_length() -> None:
    tokenizer = tiny_tokenizer()
    (letter,) = tokenizer("x", add_special_tokens=False)["input_ids"]
    policy = always(PolicyModel(tiny_model(vocab_size=len(tokenizer))), letter)
    config = RolloutConfig(max_new_tokens=9, stop_strings=["x"], min_new_tokens=3, renormalize=True)
    (one,) = TransformersEngine(policy, tokenizer, config).generate([[1, letter]], seeds=[1])
    assert one.ids == [letter] * 4


def test_a_stop_id_beyond_the_vocabulary_is_harmless() -> None:
    made = engine(stop_ids=[VOCABULARY + 5], min_new_tokens=2, renormalize=True)
    assert all(len(one.ids) > 2 for one in made.generate(PROMPTS, seeds=SEEDS))


def test_without_limits_there_are_no_token_sets() -> None:
    made = engine(renormalize=True)
    assert all(one.token_sets is None for one in made.generate(PROMPTS, seeds=SEEDS))
