"""Masked reductions: known answers, junk behind the mask, exactness, and two ranks that reduce together."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppo_core.errors import ShapeError
from ppo_core.masked import (
    masked_correlation,
    masked_count,
    masked_max,
    masked_mean,
    masked_quantile,
    masked_row_mean,
    masked_row_sum,
    masked_slope,
    masked_std,
    masked_sum,
    masked_var,
    masked_whiten,
)

REDUCTIONS = [masked_sum, masked_mean, masked_var, masked_std, masked_max, masked_row_sum, masked_row_mean]
NAN, INF = math.nan, math.inf


@st.composite
def batches(draw: st.DrawFn, min_tokens: int = 1) -> tuple[Tensor, Tensor]:
    """x [B, T] float64 and its mask, with at least so many real tokens."""
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    size = rows * columns
    values = draw(st.lists(st.floats(-1e3, 1e3), min_size=size, max_size=size))
    mask = draw(st.lists(st.booleans(), min_size=size, max_size=size).filter(lambda bits: sum(bits) >= min_tokens))
    return torch.tensor(values, dtype=torch.float64).view(rows, columns), torch.tensor(mask).view(rows, columns)


def test_mean_and_variance_by_hand() -> None:
    x = torch.tensor([[1.0, 2.0, 9.0], [6.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert masked_mean(x, mask) == 3.0
    assert masked_var(x, mask) == pytest.approx((4 + 1 + 9) / 3)
    assert masked_std(x, mask) == pytest.approx(math.sqrt(14 / 3))
    assert masked_sum(x, mask) == 9.0
    assert masked_max(x, mask) == 6.0
    assert masked_count(mask) == 3


def test_row_results_by_hand() -> None:
    x = torch.tensor([[1.0, 2.0, 9.0], [9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    assert masked_row_sum(x, mask).tolist() == [3.0, 0.0]
    assert masked_row_mean(x, mask).tolist() == [1.5, 0.0]


def test_whitening_two_tokens_gives_minus_one_and_one() -> None:
    """T10: alibaba/ROLL#475. The variance is biased: with n - 1 these would be -0.707 and 0.707."""
    assert masked_whiten(torch.tensor([[1.0, 3.0]]), torch.ones(1, 2)).tolist() == [[-1.0, 1.0]]


def test_whitening_one_token_gives_zero() -> None:
    """T10: alibaba/ROLL#475. Divided by n - 1 = 0 it would be NaN."""
    assert masked_whiten(torch.tensor([[0.7]]), torch.ones(1, 1)).tolist() == [[0.0]]


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_no_real_token_gives_zero_everywhere(shape: tuple[int, int]) -> None:
    """T10: alibaba/ROLL#475, with not one token."""
    x, mask = torch.full(shape, NAN), torch.zeros(shape)
    for reduce in REDUCTIONS:
        assert not reduce(x, mask).any()
    assert masked_quantile(x, mask, 0.5) == 0
    assert masked_correlation(x, x, mask) is None
    assert masked_slope(x, x, mask) is None
    assert torch.equal(masked_whiten(x, mask), torch.zeros(shape))


@pytest.mark.parametrize("value", [0.1, -5e3, 1e30, 3e38, 1e-30])
def test_equal_values_however_large_do_not_vary(value: float) -> None:
    x, mask = torch.full((7, 13), value), torch.ones(7, 13)
    assert masked_var(x, mask) == 0
    assert not masked_whiten(x, mask).any()
    assert masked_mean(x, mask) == x[0, 0]


def test_a_large_offset_costs_no_digits() -> None:
    x = 1e6 + torch.tensor([[0.0, 0.25, 0.5, 0.75]])
    mask = torch.ones(1, 4)
    assert masked_var(x, mask) == pytest.approx(0.078125, rel=1e-6)
    assert torch.allclose(masked_whiten(x, mask), masked_whiten(x - 1e6, mask), atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [(torch.float32, torch.float32), (torch.float64, torch.float64), (torch.bfloat16, torch.float32)],
)
def test_dtype_is_kept_and_bfloat16_raised(dtype: torch.dtype, kept: torch.dtype) -> None:
    x, mask = torch.ones(2, 3, dtype=dtype), torch.ones(2, 3, dtype=torch.bool)
    assert {reduce(x, mask).dtype for reduce in [*REDUCTIONS, masked_whiten]} == {kept}


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.uint8, torch.float32])
def test_a_mask_is_bool_or_zero_and_one(mask_dtype: torch.dtype) -> None:
    mask = torch.tensor([[1, 0, 1]]).to(mask_dtype)
    assert masked_mean(torch.tensor([[1.0, NAN, 2.0]]), mask) == 1.5


def test_shapes_must_agree() -> None:
    for reduce in [*REDUCTIONS, masked_whiten]:
        with pytest.raises(ShapeError, match=r"x has shape \[2, 3\], its mask \[2, 1\]"):
            reduce(torch.ones(2, 3), torch.ones(2, 1))


def test_quantile_interpolates() -> None:
    x, mask = torch.tensor([[4.0, 1.0, NAN], [2.0, 3.0, INF]]), torch.tensor([[1, 1, 0], [1, 1, 0]])
    assert [float(masked_quantile(x, mask, q)) for q in (0.0, 0.5, 1.0)] == [1.0, 2.5, 4.0]
    assert float(masked_quantile(x, mask, 0.95)) == pytest.approx(3.85)


def test_correlation_knows_its_ends() -> None:
    x, mask = torch.tensor([[1.0, 2.0, 4.0, NAN]]), torch.tensor([[1, 1, 1, 0]])
    assert masked_correlation(x, 3 * x + 1, mask) == pytest.approx(1.0)
    assert masked_correlation(x, -x, mask) == pytest.approx(-1.0)
    assert masked_correlation(x, torch.ones_like(x), mask) is None


def test_slope_by_hand() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 8.0])
    y = torch.tensor([1.0, 1.0, 4.0, NAN])
    mask = torch.tensor([True, True, True, False])
    assert masked_slope(x, y, mask) == 1.5
    assert masked_slope(x, 1e6 - 2 * x, mask) == pytest.approx(-2.0)
    assert masked_slope(torch.ones_like(x), y, mask) is None


@settings(deadline=None, max_examples=50)
@given(batches(), st.sampled_from([NAN, INF, -INF, 1e300]))
def test_junk_behind_the_mask_changes_neither_result_nor_gradient(batch: tuple[Tensor, Tensor], junk: float) -> None:
    x, mask = batch
    for reduce in (masked_sum, masked_mean, masked_var, masked_row_sum, masked_row_mean, masked_whiten):
        clean = torch.where(mask, x, 0.0).requires_grad_()
        dirty = torch.where(mask, x, junk).requires_grad_()
        results = [reduce(clean, mask), reduce(dirty, mask)]
        assert torch.equal(*results)
        for result in results:
            result.square().sum().backward()
        assert clean.grad is not None
        assert dirty.grad is not None
        assert torch.equal(clean.grad, dirty.grad)
        assert not dirty.grad[~mask].any()


@settings(deadline=None, max_examples=50)
@given(batches(), st.integers(0, 3), st.randoms(use_true_random=False))
def test_padding_and_row_order_change_nothing(batch: tuple[Tensor, Tensor], extra: int, random: object) -> None:
    x, mask = batch
    order = list(range(x.shape[0]))
    random.shuffle(order)  # type: ignore[attr-defined]
    padded = torch.cat([torch.full((x.shape[0], extra), NAN, dtype=x.dtype), x], dim=1)[order]
    padded_mask = torch.cat([torch.zeros(x.shape[0], extra, dtype=torch.bool), mask], dim=1)[order]
    for reduce in (masked_sum, masked_mean, masked_var, masked_max):
        assert torch.allclose(reduce(padded, padded_mask), reduce(x, mask), rtol=1e-12, atol=1e-9)
    whitened = masked_whiten(padded, padded_mask)[:, extra:]
    assert torch.allclose(whitened, masked_whiten(x, mask)[order], atol=1e-6)


@settings(deadline=None, max_examples=50)
@given(batches(min_tokens=2))
def test_whitened_values_have_mean_0_and_variance_1(batch: tuple[Tensor, Tensor]) -> None:
    x, mask = batch
    variance = float(masked_var(x, mask))
    whitened = masked_whiten(x, mask)
    assert float(masked_mean(whitened, mask)) == pytest.approx(0, abs=1e-6)
    # eps stands inside the root: a variance v becomes v / (v + eps).
    assert float(masked_var(whitened, mask)) == pytest.approx(variance / (variance + 1e-8), abs=1e-6)


@settings(deadline=None, max_examples=50)
@given(batches())
def test_results_agree_with_the_plain_ones_on_the_real_values(batch: tuple[Tensor, Tensor]) -> None:
    x, mask = batch
    real = x[mask]
    assert torch.allclose(masked_mean(x, mask), real.mean(), atol=1e-9)
    assert torch.allclose(masked_var(x, mask), real.var(correction=0), atol=1e-6)
    assert masked_max(x, mask) == real.max()
    assert torch.allclose(masked_quantile(x, mask, 0.3), real.quantile(0.3), atol=1e-9)


@settings(deadline=None, max_examples=50)
@given(
    st.floats(-1e30, 1e30, allow_subnormal=False), st.integers(1, 300), st.sampled_from([torch.float32, torch.float64])
)
def test_values_that_are_all_equal_whiten_to_nothing(value: float, count: int, dtype: torch.dtype) -> None:
    x = torch.full((1, count), value, dtype=dtype)
    mask = torch.ones_like(x)
    assert float(masked_var(x, mask)) <= 1e-3
    assert float(masked_whiten(x, mask).abs().max()) <= 1e-3


X = torch.tensor([[1.0, 5.0, NAN], [2.5, NAN, NAN], [-3.0, 4.0, 8.0], [NAN, NAN, NAN]])
Y = torch.tensor([[2.0, 4.0, NAN], [1.5, NAN, NAN], [-1.0, 7.0, 2.0], [NAN, NAN, NAN]])


def _reduce_on_one_rank(rank: int, folder: str) -> None:
    """Rank 0 has rows 0 to 2 and rank 1 the empty row, then both have two rows: as one process with all four."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    group = dist.group.WORLD
    mask = ~X.isnan()
    for cut in (3, 2):
        rows = slice(0, cut) if rank == 0 else slice(cut, None)
        x, y, m = X[rows], Y[rows], mask[rows]
        for reduce in (masked_sum, masked_mean, masked_var, masked_std, masked_max):
            torch.testing.assert_close(reduce(x, m, group=group), reduce(X, mask))
        assert masked_count(m, group) == 6
        torch.testing.assert_close(masked_quantile(x, m, 0.4, group), masked_quantile(X, mask, 0.4))
        torch.testing.assert_close(masked_whiten(x, m, group=group), masked_whiten(X, mask)[rows])
        assert masked_correlation(x, y, m, group) == pytest.approx(masked_correlation(X, Y, mask))
        assert masked_slope(x, y, m, group) == pytest.approx(masked_slope(X, Y, mask))
    dist.destroy_process_group()


def test_two_ranks_reduce_as_one(tmp_path: Path) -> None:
    mp.spawn(_reduce_on_one_rank, args=(str(tmp_path),), nprocs=2)


@settings(deadline=None)
@given(st.integers(0, 10_000), st.floats(-100, 100), st.floats(0.5, 50))
def test_mean_variance_and_whitening_follow_shift_and_scale(seed: int, shift: float, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 6, generator=generator) < 0.6
    mask[0, :2] = True
    moved = scale * x + shift
    torch.testing.assert_close(masked_mean(moved, mask), scale * masked_mean(x, mask) + shift)
    torch.testing.assert_close(masked_var(moved, mask), scale**2 * masked_var(x, mask))
    whitened = masked_whiten(moved, mask, eps=0.0)
    torch.testing.assert_close(whitened, masked_whiten(x, mask, eps=0.0), rtol=1e-6, atol=1e-6)
