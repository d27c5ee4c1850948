"""GAE: worked numbers, the identities at lam 0 and 1, gaps, and what must not change the result."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppo_core.advantages import gae
from ppo_core.errors import ShapeError


def grids(seed: int, rows: int = 3, columns: int = 7, share: float = 0.7) -> tuple[Tensor, Tensor, Tensor]:
    """Random rewards, values and a scattered mask, float64."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(rows, columns, generator=generator, dtype=torch.float64) for _ in range(2))
    return rewards, values, torch.rand(rows, columns, generator=generator) < share


def slow_gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """The definition, row by row over the real tokens alone."""
    advantages = torch.zeros_like(rewards)
    for row in range(rewards.shape[0]):
        next_value = next_advantage = 0.0
        for t in reversed(mask[row].nonzero().flatten().tolist()):
            delta = float(rewards[row, t]) + gamma * next_value - float(values[row, t])
            next_advantage = delta + gamma * lam * next_advantage
            next_value = float(values[row, t])
            advantages[row, t] = next_advantage
    return advantages


def test_three_tokens_by_hand() -> None:
    advantages, returns = gae(
        torch.tensor([[0.0, 0.0, 1.0]]), torch.full((1, 3), 0.5), torch.ones(1, 3), gamma=1.0, lam=0.5
    )
    assert advantages.tolist() == [[0.125, 0.25, 0.5]]
    assert returns.tolist() == [[0.625, 0.75, 1.0]]


def test_nothing_beyond_the_last_token_is_bootstrapped() -> None:
    """A large value in the column after the answer is nobody's next value."""
    rewards, values = torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([[0.5, 0.5, 1e6]])
    advantages, returns = gae(rewards, values, torch.tensor([[1, 1, 0]]), lam=1.0)
    assert advantages.tolist() == [[0.5, 0.5, 0.0]]
    assert returns.tolist() == [[1.0, 1.0, 0.0]]


def test_across_a_gap_the_next_token_is_the_next_real_one() -> None:
    rewards, values = torch.tensor([[1.0, 9.0, 9.0, 2.0]]), torch.tensor([[0.5, 9.0, 9.0, 0.25]])
    gapped = gae(rewards, values, torch.tensor([[1, 0, 0, 1]]), 0.9, 0.8)
    closed = gae(rewards[:, [0, 3]], values[:, [0, 3]], torch.ones(1, 2), 0.9, 0.8)
    for with_gap, without in zip(gapped, closed, strict=True):
        torch.testing.assert_close(with_gap[:, [0, 3]], without)
        assert not with_gap[:, 1:3].any()


@pytest.mark.parametrize(("rows", "columns"), [(2, 3), (0, 3), (2, 0)])
def test_rows_without_a_token_give_zero(rows: int, columns: int) -> None:
    junk = torch.full((rows, columns), math.nan)
    for result in gae(junk, junk, torch.zeros(rows, columns)):
        assert torch.equal(result, torch.zeros(rows, columns))


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [(torch.float32, torch.float32), (torch.float64, torch.float64), (torch.bfloat16, torch.float32)],
)
def test_dtype_is_kept_and_bfloat16_raised(dtype: torch.dtype, kept: torch.dtype) -> None:
    x = torch.ones(2, 3, dtype=dtype)
    assert {result.dtype for result in gae(x, x, torch.ones(2, 3))} == {kept}


def test_shapes_must_agree() -> None:
    with pytest.raises(ShapeError, match=r"values has shape \[2, 4\], its mask \[2, 3\]"):
        gae(torch.zeros(2, 3), torch.zeros(2, 4), torch.ones(2, 3))
    with pytest.raises(ShapeError, match=r"expected \[B, T\]"):
        gae(torch.zeros(3), torch.zeros(3), torch.ones(3))


def test_ten_thousand_tokens_keep_float32_precision() -> None:
    rewards, values, mask = grids(0, rows=1, columns=10_000, share=1.0)
    rewards, values = rewards.float(), values.float()
    narrow, _ = gae(rewards, values, mask, 1.0, 0.999)
    wide, _ = gae(rewards.double(), values.double(), mask, 1.0, 0.999)
    torch.testing.assert_close(narrow.double(), wide, rtol=1e-6, atol=1e-6)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.floats(0, 1), st.floats(0, 1))
def test_it_is_the_definition(seed: int, gamma: float, lam: float) -> None:
    rewards, values, mask = grids(seed)
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    torch.testing.assert_close(advantages, slow_gae(rewards, values, mask, gamma, lam))
    torch.testing.assert_close(returns, torch.where(mask, advantages + values, 0.0))


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000))
def test_at_lam_1_the_returns_are_the_rewards_to_go(seed: int) -> None:
    rewards, values, mask = grids(seed)
    advantages, returns = gae(rewards, values, mask, gamma=1.0, lam=1.0)
    to_go = torch.where(mask, rewards, 0.0).flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(returns, torch.where(mask, to_go, 0.0))
    torch.testing.assert_close(advantages, torch.where(mask, to_go - values, 0.0))


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.floats(0, 1), st.floats(0, 1))
def test_values_that_are_the_rewards_to_go_leave_nothing_to_gain(seed: int, gamma: float, lam: float) -> None:
    rewards, _, mask = grids(seed)
    true_values = gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)[1]
    advantages, returns = gae(rewards, true_values, mask, gamma, lam)
    torch.testing.assert_close(advantages, torch.zeros_like(advantages), rtol=0, atol=1e-12)
    torch.testing.assert_close(returns, true_values)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.floats(0, 1), st.floats(0, 1))
def test_float32_is_float64_but_for_the_last_rounding(seed: int, gamma: float, lam: float) -> None:
    rewards, values, mask = grids(seed)
    narrow = gae(rewards.float(), values.float(), mask, gamma, lam)
    wide = gae(rewards.float().double(), values.float().double(), mask, gamma, lam)
    for got, expected in zip(narrow, wide, strict=True):
        assert torch.equal(got, expected.float())


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.sampled_from([math.nan, math.inf, 1e30]), st.integers(0, 3))
def test_junk_padding_and_row_order_change_nothing(seed: int, junk: float, extra: int) -> None:
    rewards, values, mask = grids(seed)
    order = torch.randperm(3, generator=torch.Generator().manual_seed(seed))

    def dirty(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(torch.where(mask, x, junk), (extra, extra), value=junk)[order]

    padded_mask = torch.nn.functional.pad(mask, (extra, extra))[order]
    results = gae(dirty(rewards), dirty(values), padded_mask, 0.99, 0.95)
    for got, expected in zip(results, gae(rewards, values, mask, 0.99, 0.95), strict=True):
        assert torch.equal(got[:, extra : extra + 7], expected[order])
        assert not got[~padded_mask].any()


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.floats(0, 1), st.sampled_from([torch.float32, torch.float64]))
def test_without_a_future_the_return_is_the_reward(seed: int, lam: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(4, 6, generator=generator, dtype=dtype) for _ in range(2))
    mask = torch.rand(4, 6, generator=generator) < 0.6
    _, returns = gae(rewards, values, mask, 0.0, lam)
    torch.testing.assert_close(returns, torch.where(mask, rewards, 0))
