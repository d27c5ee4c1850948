"""Explained variance: known answers, None where nothing varies, junk behind the mask."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_core.diagnostics import explained_variance
from ppo_core.errors import ShapeError

RETURNS = torch.tensor([[0.0, 2.0, math.nan]])
MASK = torch.tensor([[1, 1, 0]])


@pytest.mark.parametrize(
    ("values", "expected"),
    [([0.0, 2.0, 7.0], 1.0), ([1.0, 3.0, 7.0], 1.0), ([1.0, 1.0, math.inf], 0.0), ([2.0, 0.0, -5.0], -3.0)],
    ids=["the returns", "the returns and a constant", "a constant", "the wrong way round"],
)
def test_known_answers(values: list[float], expected: float) -> None:
    got = explained_variance(torch.tensor([values]), RETURNS, MASK)
    assert isinstance(got, float)
    assert got == pytest.approx(expected)


@pytest.mark.parametrize("returns", [[[0.1, 0.1, 0.1]], [[1e30, 1e30, 1e30]]])
def test_it_is_none_where_the_returns_do_not_vary(returns: list[list[float]]) -> None:
    assert explained_variance(torch.randn(1, 3), torch.tensor(returns), torch.ones(1, 3)) is None


def test_it_is_none_for_one_token_and_for_none() -> None:
    x = torch.randn(1, 3)
    assert explained_variance(x, x, torch.tensor([[1, 0, 0]])) is None
    assert explained_variance(x, x, torch.zeros(1, 3)) is None


def test_large_returns_cost_no_digits() -> None:
    """float32 values of 16384 with a spread of 1: the differences are taken in float64."""
    returns = 16384 + torch.tensor([[0.0, 0.5, 1.0]])
    values = 16384 + torch.tensor([[0.25, 0.5, 0.75]])
    assert explained_variance(values, returns, torch.ones(1, 3)) == pytest.approx(0.75)


def test_shapes_must_agree() -> None:
    with pytest.raises(ShapeError, match="returns"):
        explained_variance(torch.zeros(2, 3), torch.zeros(2, 1), torch.ones(2, 3))


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.floats(-100, 100), st.sampled_from([torch.float32, torch.float64]))
def test_a_constant_error_costs_nothing_and_values_that_know_nothing_earn_nothing(
    seed: int, shift: float, dtype: torch.dtype
) -> None:
    """It measures what the values tell apart, not how far off they are; random values never beat perfect ones."""
    generator = torch.Generator().manual_seed(seed)
    returns, values = (torch.randn(3, 6, generator=generator, dtype=dtype) for _ in range(2))
    mask = torch.ones_like(returns)
    mask[0, 3:] = 0
    perfect, constant, some = (
        explained_variance(x, returns, mask) for x in (returns + shift, torch.full_like(returns, shift), values)
    )
    assert perfect == pytest.approx(1.0, abs=1e-4)
    assert constant == pytest.approx(0.0, abs=1e-4)
    assert some is not None
    assert some <= 1.0
    assert explained_variance(values + shift, returns, mask) == pytest.approx(some, abs=1e-3)
