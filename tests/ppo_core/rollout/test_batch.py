"""The rollout record: masks from recorded lengths, ids as they were sampled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from ppo_core.data.prompts import PromptBatch
from ppo_core.errors import RolloutError
from ppo_core.models.token_sets import TokenSets
from ppo_core.rollout.batch import Rollout, assemble
from ppo_core.rollout.engine import Response
from ppo_core.training.microbatches import microbatches
from tests.ppo_core.rollout.scripted_engine import response
from tests.ppo_core.tiny_models import tiny_tokenizer


def prompts(*ids: list[int]) -> PromptBatch:
    return PromptBatch(list(ids), [f"prompt {row}" for row in range(len(ids))], list(range(10, 10 + len(ids))))


def made(batch: PromptBatch, responses: list[Response], pad_id: int = 0) -> Rollout:
    tokenizer = tiny_tokenizer()
    return assemble(batch, responses, pad_id, lambda ids: tokenizer.decode(ids, skip_special_tokens=True), 3)


def test_a_pad_id_that_is_the_end_of_text_masks_nothing() -> None:
    """T01: huggingface/trl#5303. Prompt width 2, three tokens, the last of them 0 = pad = end."""
    rollout = made(prompts([5, 6], [5, 6]), [response([7, 8, 0]), response([7, 8, 4, 4, 0])], pad_id=0)
    assert rollout.response_mask.int().tolist() == [[0, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]]
    assert rollout.response_mask.sum(1).tolist() == rollout.response_length.tolist() == [3, 5]
    assert rollout.attention_mask.tolist()[0] == [1, 1, 1, 1, 1, 0, 0]


def test_lengths_are_the_engines_word() -> None:
    """T03: verl-project/verl#3805. No end-of-text in either row."""
    rollout = made(prompts([5, 6], [5]), [response([7, 8], "length"), response([7, 8, 9, 4, 4], "length")])
    assert rollout.response_mask.sum(1).tolist() == [2, 5]
    assert rollout.truncated.tolist() == [True, True]


def test_empty_responses_are_rows_like_others() -> None:
    """T09: CarperAI/trlx#373. Three rows in, three rows accounted for."""
    rollout = made(prompts([5, 6], [5, 6], [5, 6]), [response([2]), response([7, 8, 2]), response([], "length")])
    assert rollout.num_rows == 3
    assert rollout.num_empty == 2  # an end-of-text alone is empty, too
    assert rollout.response_mask.sum(1).tolist() == [1, 3, 0]
    assert rollout.response_ids(1) == [7, 8, 2]
    assert rollout.response_ids(2) == []
    assert rollout.response_texts[0] == rollout.response_texts[2] == ""
    assert rollout.lengths.tolist() == [3, 5, 2]


def test_only_empty_responses_are_legal() -> None:
    rollout = made(prompts([5], [6]), [response([], "length"), response([], "length")])
    assert rollout.response_mask.shape == (2, 0)


def test_ids_are_never_encoded_again() -> None:
    """T17: NovaSky-AI/SkyRL#123. 6 = "ab", 4 = "a", 5 = "b"; 4 5 was sampled."""
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "a": 4, "b": 5, "ab": 6}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocabulary, [("a", "b")])))
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    rollout = assemble(prompts([4]), [response([4, 5], "length")], 0, tokenizer.decode, 0)
    assert rollout.response_ids(0) == [4, 5]
    assert rollout.response_texts == ("ab",)
    assert tokenizer("ab")["input_ids"] == [6]


def test_the_space_between_prompt_and_response_is_the_responses() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"▁a": 0, "▁b": 1}, [])))
    tokenizer.backend_tokenizer.decoder = decoders.Metaspace()
    assert tokenizer.decode([1]) == "b"
    rollout = assemble(prompts([0]), [response([1])], 0, tokenizer.decode, 0)
    assert rollout.response_texts == (" b",)


def test_engine_logprobs_lie_on_the_grid() -> None:
    rollout = made(prompts([5, 6], [5]), [Response([7, 2], "stop", [-1.0, -2.0]), Response([9], "length", [-3.0])])
    assert rollout.engine_logprobs.tolist() == [[0, -1, -2], [-3, 0, 0]]


def test_select_keeps_rows_whole() -> None:
    rollout = made(prompts([5, 6], [5], [7, 7]), [response([7, 2]), response([], "length"), response([9], "length")])
    some = rollout.select(torch.tensor([2, 0]))
    assert some.num_rows == 2
    assert some.prompt_indices == (12, 10)
    assert some.prompt_texts == ("prompt 2", "prompt 0")
    assert some.finish_reasons == ("length", "stop")
    assert some.truncated.tolist() == [True, False]
    assert torch.equal(some.input_ids, rollout.input_ids[[2, 0]])
    assert torch.equal(some.response_mask, rollout.response_mask[[2, 0]])
    assert some.policy_version == 3


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(RolloutError, match="2 prompts but 1 responses"):
        made(prompts([5], [6]), [response([7])])
    with pytest.raises(RolloutError, match="row 0 ended by 'abort'"):
        made(prompts([5]), [response([7], "abort")])
    with pytest.raises(RolloutError, match="row 0 has 2 tokens but 1 logprobs"):
        made(prompts([5]), [Response([7, 8], "stop", [-1.0])])


def limited(ids: list[int], finish_reason: str, drawable: list[list[int]]) -> Response:
    """A response that says which ids could be drawn."""
    flat = torch.tensor([token for one in drawable for token in one], dtype=torch.int32)
    sets = TokenSets(flat, torch.tensor([len(one) for one in drawable], dtype=torch.long), "drawable")
    return replace(response(ids, finish_reason), token_sets=sets)


def test_token_sets_follow_their_rows() -> None:
    responses = [limited([7, 2], "stop", [[7, 8], [2]]), limited([], "length", []), limited([9], "length", [[3, 9]])]
    rollout = made(prompts([5, 6], [5], [7, 7]), responses)
    found = rollout.select(torch.tensor([2, 1, 0])).token_sets_of(torch.tensor([2, 0]))
    assert found is not None
    assert (found.ids.tolist(), found.counts.tolist()) == ([7, 8, 2, 3, 9], [2, 1, 2])
    assert made(prompts([5]), [response([7])]).token_sets_of(torch.tensor([0])) is None


def test_microbatches_carry_the_sets_of_their_rows_and_only_those() -> None:
    responses = [limited([7, 2], "stop", [[7, 8], [2]]), limited([], "length", []), limited([9], "length", [[3, 9]])]
    rollout = made(prompts([5, 6], [5], [7, 7]), responses)
    parts = microbatches(rollout, torch.arange(3), token_budget=1)
    assert [part.token_sets.ids.tolist() for part in parts if part.token_sets] == [[7, 8, 2], [3, 9]]
    assert [len(part.token_sets) for part in parts if part.token_sets is not None] == [2, 1, 0]


def test_token_sets_that_cannot_be_are_refused() -> None:
    with pytest.raises(RolloutError, match="row 0 has 1 tokens but 2 token sets"):
        made(prompts([5]), [limited([7], "stop", [[7], [8]])])
    with pytest.raises(RolloutError, match="only 1 of 2 responses say which tokens could be drawn"):
        made(prompts([5], [6]), [limited([7], "stop", [[7]]), response([7])])
