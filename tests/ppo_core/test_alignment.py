"""The shifted grid: which token a position is about, which positions are responses, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppo_core.alignment import gathered_logprobs, next_tokens, on_grid, response_mask, token_logprobs
from ppo_core.errors import AlignmentError, PPOCoreError, ShapeError


def test_logprobs_by_hand_with_temperature() -> None:
    """Logits 2 1 0 at temperature 0.5, token 1: -2.1429, where the raw logits give -1.4076 (OpenRLHF#853)."""
    logits, input_ids = torch.tensor([[[2.0, 1.0, 0.0], [0.0, 0.0, 0.0]]]), torch.tensor([[0, 1]])
    assert token_logprobs(logits, input_ids, temperature=0.5).item() == pytest.approx(-2.1429, abs=1e-4)
    assert token_logprobs(logits, input_ids).item() == pytest.approx(-1.4076, abs=1e-4)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_logprobs_are_log_softmax_at_the_next_token(temperature: float) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 5, 11, generator=generator, dtype=torch.float64) * 5
    input_ids = torch.randint(0, 11, (3, 5), generator=generator)
    got = token_logprobs(logits, input_ids, temperature)
    full = (logits / temperature).log_softmax(-1)
    for row in range(3):
        for t in range(4):
            assert got[row, t] == pytest.approx(float(full[row, t, input_ids[row, t + 1]]), abs=1e-12)


def test_the_gradient_by_the_logits_is_right() -> None:
    logits = torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)
    input_ids = torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1]])
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, input_ids, 0.7), (logits,))


def test_the_logits_are_not_changed() -> None:
    logits = torch.randn(1, 3, 4)
    before = logits.clone()
    token_logprobs(logits, torch.tensor([[0, 1, 2]]), temperature=0.5)
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [(torch.float32, torch.float32), (torch.float64, torch.float64), (torch.bfloat16, torch.float32)],
)
def test_logprobs_are_at_least_float32(dtype: torch.dtype, kept: torch.dtype) -> None:
    assert token_logprobs(torch.zeros(1, 2, 4, dtype=dtype), torch.tensor([[0, 1]])).dtype == kept


def test_logits_around_1000_keep_float32_precision() -> None:
    logits = torch.tensor([[[0.0, 1.0, 2.0], [0.0, 0.0, 0.0]]])
    input_ids = torch.tensor([[0, 2]])
    assert torch.equal(token_logprobs(logits + 1024, input_ids), token_logprobs(logits, input_ids))


def test_a_token_that_cannot_be_drawn_spoils_no_gradient() -> None:
    logits = torch.tensor([[1.0, -math.inf, 0.5]], requires_grad=True)
    gathered_logprobs(logits, torch.tensor([0])).sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 1] == 0


def test_shapes_of_logits_and_tokens_must_agree() -> None:
    with pytest.raises(ShapeError, match=r"\[2, 3, 5\].*\[2, 4\]"):
        token_logprobs(torch.zeros(2, 3, 5), torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(ShapeError):
        gathered_logprobs(torch.zeros(3, 5), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ShapeError):
        next_tokens(torch.zeros(4))
    with pytest.raises(ShapeError):
        on_grid(torch.zeros(4))


def test_values_are_those_of_the_states_that_predict() -> None:
    """The state of column t is the number t; an answer in columns 2 to 4 is predicted by states 1, 2, 3 (verl#1758)."""
    values = on_grid(torch.arange(7.0).unsqueeze(0))
    mask = response_mask(torch.tensor([[1, 1, 1, 1, 1, 0, 0]]), torch.tensor([2]), torch.tensor([3]))
    assert values[mask].tolist() == [1.0, 2.0, 3.0]


def test_a_pad_id_equal_to_the_eos_id_keeps_the_real_eos() -> None:
    """Row 5 6 7 8 0 0 0 with pad = eos = 0: the first 0 was generated, the two after it were not (trl#5303)."""
    attention = torch.tensor([[1, 1, 1, 1, 1, 0, 0]])
    mask = response_mask(attention, torch.tensor([2]), torch.tensor([3]))
    assert mask.dtype == torch.bool
    assert mask.int().tolist() == [[0, 1, 1, 1, 0, 0]]


def test_a_mask_made_by_comparing_with_the_pad_id_is_refused() -> None:
    input_ids = torch.tensor([[5, 6, 7, 8, 9, 4, 4], [5, 6, 7, 8, 0, 0, 0]])
    with pytest.raises(AlignmentError, match=r"row 1: 2 tokens .* column 2 .* 3 were generated \(1 of 2 rows") as error:
        response_mask(input_ids != 0, torch.tensor([2, 2]), torch.tensor([5, 3]))
    assert isinstance(error.value, PPOCoreError)
    assert isinstance(error.value, ValueError)
    assert error.value.code == "alignment"


def test_an_answer_without_eos_is_as_long_as_the_engine_says() -> None:
    """Lengths 2 and 5, neither with an end-of-sequence token: the padding is in no mask (verl#3805)."""
    attention = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]])
    mask = response_mask(attention, torch.tensor([2, 2]), torch.tensor([2, 5]))
    assert mask.sum(1).tolist() == [2, 5]
    with pytest.raises(AlignmentError, match="row 0: 5 tokens"):
        response_mask(torch.ones(2, 7), torch.tensor([2, 2]), torch.tensor([2, 5]))


def test_left_right_and_mixed_padding_in_one_batch() -> None:
    attention = torch.tensor(
        [
            [0, 0, 1, 1, 1, 1, 0],  # padded left and right of it: prompt at 2, 3, answer at 4, 5
            [1, 1, 1, 0, 0, 0, 0],  # padded right: prompt at 0, answer at 1, 2
            [1, 1, 0, 0, 1, 1, 1],  # prompt padded right, the answer from column 4
            [0, 0, 0, 0, 1, 1, 1],  # prompt at 4 to 6, an empty answer
        ]
    )
    mask = response_mask(attention, torch.tensor([4, 1, 4, 7]), torch.tensor([2, 2, 3, 0]))
    assert mask.int().tolist() == [[0, 0, 0, 1, 1, 0], [1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0]]


def test_a_response_in_column_0_is_refused() -> None:
    """Nothing predicts column 0, and a left-padded row that starts there would be predicted by padding."""
    for attention, length in (([1, 1, 0], 2), ([0, 1, 1], 2)):
        with pytest.raises(AlignmentError, match="row 0"):
            response_mask(torch.tensor([attention]), torch.tensor([0]), torch.tensor([length]))


def test_mask_inputs_must_share_their_rows() -> None:
    with pytest.raises(ShapeError):
        response_mask(torch.ones(2, 4), torch.tensor([1]), torch.tensor([1, 1]))
    with pytest.raises(ShapeError):
        response_mask(torch.ones(4), torch.tensor([1]), torch.tensor([1]))


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=5),
    st.integers(0, 3),
)
def test_the_mask_marks_the_generated_tokens(rows: list[tuple[int, int, int]], extra: int) -> None:
    """Rows of (prompt tokens, response tokens, padding on the left); `extra` columns of padding on the right."""
    width = max(sum(row) for row in rows) + extra
    attention = torch.zeros(len(rows), width, dtype=torch.bool)
    is_response = torch.zeros(len(rows), width, dtype=torch.bool)
    for index, (prompt, response, left) in enumerate(rows):
        attention[index, left : left + prompt + response] = True
        is_response[index, left + prompt : left + prompt + response] = True
    starts = torch.tensor([left + prompt for prompt, _, left in rows])
    lengths = torch.tensor([response for _, response, _ in rows])
    mask = response_mask(attention, starts, lengths)
    assert torch.equal(mask, next_tokens(is_response))
    assert torch.equal(mask.sum(1), lengths)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 1000), st.integers(1, 3))
def test_padding_changes_no_real_logprob(seed: int, extra: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 5, 7, generator=generator)
    input_ids = torch.randint(0, 7, (2, 5), generator=generator)
    junk = torch.full((2, extra, 7), math.nan)
    padding = torch.zeros(2, extra, dtype=torch.int64)
    left = token_logprobs(torch.cat([junk, logits], 1), torch.cat([padding, input_ids], 1))[:, extra:]
    right = token_logprobs(torch.cat([logits, junk], 1), torch.cat([input_ids, padding], 1))[:, :4]
    expected: Tensor = token_logprobs(logits, input_ids)
    assert torch.equal(left, expected)
    assert torch.equal(right, expected)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 1000), st.floats(0.1, 5), st.sampled_from([torch.float32, torch.float64]))
def test_probabilities_of_all_tokens_sum_to_1(seed: int, temperature: float, dtype: torch.dtype) -> None:
    logits = 10 * torch.randn(1, 2, 7, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    everything = torch.stack([torch.zeros(7, dtype=torch.int64), torch.arange(7)], dim=1)
    logprobs = token_logprobs(logits.expand(7, 2, 7), everything, temperature)
    assert float(logprobs.exp().sum()) == pytest.approx(1, abs=1e-5)
