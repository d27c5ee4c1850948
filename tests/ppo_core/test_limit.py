"""The analytic count against torch's own counter on a toy Llama, and the share of the limit."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from ppo_core.limit import Work, forward_work, iteration_work, limit_fraction, limit_seconds
from ppo_core.model_shape import ModelShape, model_shape

CONFIG = transformers.LlamaConfig(
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=160,
    vocab_size=200,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    attn_implementation="eager",
    bos_token_id=1,
    eos_token_id=2,
)


def toy() -> tuple[torch.nn.Module, ModelShape]:
    shape = model_shape(CONFIG.to_dict())
    assert shape is not None
    return transformers.AutoModelForCausalLM.from_config(CONFIG), shape


def whole_square(work: Work) -> float:
    """torch counts attention without leaving out the upper triangle: twice ours."""
    return work.matmul + 2 * work.attention


def test_forward_agrees_with_torchs_counter() -> None:
    model, shape = toy()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.ones(4, 24, dtype=torch.long), use_cache=False)
    assert whole_square(forward_work(shape, [24] * 4, 96)) == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_training_agrees_with_torchs_counter() -> None:
    model, shape = toy()
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.ones(4, 24, dtype=torch.long), use_cache=False).logits.sum().backward()
    work = forward_work(shape, [24] * 4, 96) * 3
    assert whole_square(work) == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_an_iteration_is_the_sum_of_its_passes() -> None:
    """One row of 3 + 2 tokens, two epochs: generation feeds 4 tokens, every other pass 5, heads see 2."""
    _, shape = toy()
    work = iteration_work(shape, [3], [2], epochs=2, reward_models=[shape])
    body, head = 2.0 * shape.body_matmul, 2.0 * shape.head_matmul
    attention = 2.0 * 3 * 64
    assert work.rollout == Work(4 * body + 2 * head, 16 * attention)
    assert work.score == Work(5 * body, 25 * attention)
    assert work.logprobs == Work(2 * (5 * body + 2 * head), 2 * 25 * attention)
    assert work.update == Work(6 * (5 * body + 2 * head), 6 * 25 * attention)
    assert work.total == work.rollout.total + work.score.total + work.logprobs.total + work.update.total


def test_an_empty_response_costs_its_prompt() -> None:
    _, shape = toy()
    assert iteration_work(shape, [3], [0], epochs=1).rollout.matmul == 2.0 * shape.body_matmul * 2


def test_lengths_of_unlike_number_are_refused() -> None:
    _, shape = toy()
    with pytest.raises(ValueError, match="argument"):
        iteration_work(shape, [3, 4], [2], epochs=1)


def test_fraction_is_limit_over_actual() -> None:
    work = iteration_work(toy()[1], [3], [2], epochs=1)
    limit_s = limit_seconds(work, 1e9)
    assert limit_s == work.total / 1e9
    assert limit_fraction(limit_s, 4 * limit_s) == pytest.approx(0.25)


@pytest.mark.parametrize(("limit_s", "actual_s"), [(2.0, 1.0), (1.0, 0.0), (1.0, -1.0)])
def test_a_fraction_that_cannot_be_is_not_shown(limit_s: float, actual_s: float) -> None:
    assert limit_fraction(limit_s, actual_s) is None


def test_a_speed_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="positive speed"):
        limit_seconds(iteration_work(toy()[1], [3], [2], epochs=1), 0.0)
