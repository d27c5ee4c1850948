"""Losses and their statistics: worked numbers, normalisation over micro-batches, junk, and extreme inputs."""

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
from ppo_core.losses import PolicyStats, ValueStats, entropy, policy_loss, token_entropies, value_loss

NAN, INF = math.nan, math.inf


def grids(seed: int, count: int, rows: int = 4, columns: int = 6) -> tuple[list[Tensor], Tensor]:
    """So many random [B, T] float32 grids, and a mask with at least one real token."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, columns, generator=generator) < 0.7
    mask[0, 0] = True
    return [torch.randn(rows, columns, generator=generator) for _ in range(count)], mask


def gradient_of(loss: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(loss, x)[0]


def test_policy_loss_by_hand() -> None:
    """Ratio 1.5 at advantages 1 and -1: clipped to -1.2 in the first, 1.5 in the second; the mean is 0.15."""
    new = torch.full((1, 3), math.log(1.5))
    loss, stats = policy_loss(new, torch.zeros(1, 3), torch.tensor([[1.0, -1.0, 9.0]]), torch.tensor([[1, 1, 0]]))
    assert float(loss) == pytest.approx(0.15)
    assert stats.num_tokens == 2
    assert float(stats.ratio_mean) == pytest.approx(1.5)
    assert float(stats.ratio_max) == pytest.approx(1.5)
    assert float(stats.max_ratio_deviation) == pytest.approx(0.5)
    assert float(stats.approx_kl) == pytest.approx(0.5 - math.log(1.5))
    assert stats.clip_fraction == 1.0
    assert stats.clip_fraction_active == 0.5
    assert stats.num_log_ratio_clamped == 0


def test_before_any_update_the_ratio_is_exactly_1() -> None:
    (logprobs, advantages), mask = grids(0, 2)
    logprobs.requires_grad_()
    loss, stats = policy_loss(logprobs, logprobs.detach(), advantages, mask)
    assert stats.max_ratio_deviation == 0
    assert stats.approx_kl == 0
    assert stats.clip_fraction == 0
    expected = torch.where(mask, -advantages / mask.sum(), 0.0)
    torch.testing.assert_close(gradient_of(loss, logprobs), expected)


def test_the_ratio_deviation_sees_both_directions() -> None:
    _, stats = policy_loss(torch.tensor([[-0.5, 0.1]]), torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2))
    assert float(stats.max_ratio_deviation) == pytest.approx(1 - math.exp(-0.5))
    assert float(stats.ratio_max) == pytest.approx(math.exp(0.1))


def test_log_ratios_beyond_20_are_clamped_and_counted() -> None:
    new = torch.tensor([[100.0, -100.0, 19.5, 0.0, 500.0]], requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    loss, stats = policy_loss(new, torch.zeros(1, 5), -torch.ones(1, 5), mask)
    assert stats.num_log_ratio_clamped == 2
    assert float(stats.ratio_max) == pytest.approx(math.exp(20))
    assert loss.isfinite()
    assert gradient_of(loss, new).isfinite().all()


def test_a_nan_on_a_real_token_reaches_loss_and_deviation() -> None:
    """It must not be hidden: the loop skips a non-finite step and counts it."""
    loss, stats = policy_loss(torch.tensor([[NAN, 0.0]]), torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2))
    assert loss.isnan()
    assert stats.max_ratio_deviation.isnan()


def test_value_loss_by_hand() -> None:
    """v 1, v_old 0, R 1: the clipped value .2 is .8 off, and half of .64 is .32; without the clip 0."""
    one, zero, mask = torch.ones(1, 1), torch.zeros(1, 1), torch.ones(1, 1)
    loss, stats = value_loss(one, zero, one, mask)
    assert float(loss) == pytest.approx(0.32)
    assert stats.clip_fraction == 1
    loss, stats = value_loss(one, zero, one, mask, clip_range=None)
    assert loss == 0
    assert stats.clip_fraction == 0


def test_without_the_clip_it_is_half_the_squared_error() -> None:
    (values, old, returns), mask = grids(1, 3)
    values.requires_grad_()
    loss, _ = value_loss(values, old, returns, mask, clip_range=None)
    torch.testing.assert_close(loss, (0.5 * (values - returns) ** 2)[mask].mean())
    torch.testing.assert_close(gradient_of(loss, values), torch.where(mask, values - returns, 0.0) / mask.sum())


def test_values_inside_the_clip_range_never_count_as_clipped() -> None:
    """old + (v - old) rounds; the clipped value must be v itself inside the range."""
    (values, old, returns), _ = grids(2, 3, rows=100, columns=100)
    _, stats = value_loss(values, old, returns, torch.ones(100, 100), clip_range=1e6)
    assert stats.num_clipped == 0


def test_entropy_of_a_uniform_distribution_is_the_logarithm_of_its_size() -> None:
    assert float(entropy(torch.zeros(1, 3, 8), torch.tensor([[1, 0]]))) == pytest.approx(math.log(8))


def test_entropy_is_of_the_sampled_distribution() -> None:
    """At temperature 0.5 logits 0 and 1 are those of 0 and 2."""
    logits = torch.tensor([[[0.0, 1.0], [0.0, 0.0]]])
    p = 1 / (1 + math.exp(-2))
    expected = -p * math.log(p) - (1 - p) * math.log(1 - p)
    assert float(entropy(logits, torch.ones(1, 1), temperature=0.5)) == pytest.approx(expected)


def test_entropy_with_minus_infinity_is_that_of_the_others_forward_and_backward() -> None:
    full = torch.tensor([[0.3, -INF, 1.0, -INF], [-INF, 0.0, -INF, -INF]], requires_grad=True)
    rest = torch.tensor([0.3, 1.0], requires_grad=True)
    entropies = token_entropies(full)
    torch.testing.assert_close(entropies[0], token_entropies(rest))
    assert entropies[1] == 0
    gradient = gradient_of(entropies.sum(), full)
    assert gradient.isfinite().all()
    torch.testing.assert_close(gradient[0, [0, 2]], gradient_of(token_entropies(rest), rest))
    assert not gradient[1].any()


def test_entropy_gradient_is_right() -> None:
    logits = torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 0, 1], [0, 1, 0]])
    assert torch.autograd.gradcheck(lambda x: entropy(x, mask, 0.7), (logits,))


@pytest.mark.parametrize("junk", [NAN, INF, -INF])
def test_junk_logits_behind_the_mask_have_no_effect(junk: float) -> None:
    logits = torch.randn(2, 4, 5)
    mask = torch.tensor([[1, 0, 1], [0, 1, 0]])
    dirty = logits.clone()
    dirty[:, :-1][mask == 0] = junk
    dirty[:, -1] = junk
    logits.requires_grad_()
    dirty.requires_grad_()
    clean_entropy, dirty_entropy = entropy(logits, mask), entropy(dirty, mask)
    assert torch.equal(clean_entropy, dirty_entropy)
    assert torch.equal(gradient_of(clean_entropy, logits), gradient_of(dirty_entropy, dirty))


def test_no_real_token_gives_loss_0_and_gradient_0() -> None:
    x, mask = torch.full((2, 3), NAN, requires_grad=True), torch.zeros(2, 3)
    logits = torch.full((2, 4, 5), NAN, requires_grad=True)
    policy, policy_stats = policy_loss(x, x, x, mask)
    value, value_stats = value_loss(x, x, x, mask)
    for loss, source in ((policy, x), (value, x), (entropy(logits, mask), logits)):
        assert loss == 0
        assert not gradient_of(loss, source).any()
    for number in (policy_stats.ratio_mean, policy_stats.ratio_max, policy_stats.approx_kl, value_stats.clip_fraction):
        assert number == 0
    assert policy_loss(x, x, x, mask, num_tokens=0)[0] == 0


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [(torch.float32, torch.float32), (torch.float64, torch.float64), (torch.bfloat16, torch.float32)],
)
def test_dtype_is_kept_and_bfloat16_raised(dtype: torch.dtype, kept: torch.dtype) -> None:
    x, mask = torch.zeros(1, 2, dtype=dtype), torch.ones(1, 2)
    assert policy_loss(x, x, x, mask)[0].dtype == kept
    assert value_loss(x, x, x, mask)[0].dtype == kept
    assert entropy(torch.zeros(1, 3, 4, dtype=dtype), mask).dtype == kept


def test_shapes_must_agree() -> None:
    x, other = torch.zeros(2, 3), torch.zeros(2, 1)
    with pytest.raises(ShapeError, match="advantages"):
        policy_loss(x, x, other, x)
    with pytest.raises(ShapeError, match="returns"):
        value_loss(x, x, other, x)
    with pytest.raises(ShapeError, match=r"logits have shape \[2, 3, 5\], mask \[2, 3\]"):
        entropy(torch.zeros(2, 3, 5), x)


def test_old_values_and_advantages_get_no_gradient() -> None:
    (new, old, advantages), mask = grids(3, 3)
    for tensor in (new, old, advantages):
        tensor.requires_grad_()
    for loss, _ in (policy_loss(new, old, advantages, mask), value_loss(new, old, advantages, mask)):
        gradients = torch.autograd.grad(loss, (new, old, advantages), allow_unused=True)
        assert gradients[0] is not None
        assert gradients[1:] == (None, None)


def test_micro_batches_of_10_and_90_tokens_weigh_by_their_tokens() -> None:
    """T27: NovaSky-AI/SkyRL#925. Losses 0.8 and 0.2 per token give 0.26, not the 0.50 of a mean of means."""
    total = torch.zeros(())
    for num_tokens, per_token in ((10, 0.8), (90, 0.2)):
        x, mask = torch.zeros(1, num_tokens), torch.ones(1, num_tokens)
        total += policy_loss(x, x, torch.full_like(x, -per_token), mask, num_tokens=100)[0]
    assert float(total) == pytest.approx(0.26)


@pytest.mark.parametrize("num_tokens_of", [int, lambda count: torch.tensor(count)], ids=["int", "tensor"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_micro_batches_add_up_to_the_whole(size: int, num_tokens_of: type) -> None:
    """Losses, gradients and statistics: one batch of four rows, or cut into micro-batches."""
    (new, old, advantages, values, returns), mask = grids(4, 5)
    logits = torch.randn(4, 7, 5, generator=torch.Generator().manual_seed(4), requires_grad=True)
    new.requires_grad_()
    values.requires_grad_()
    num_tokens = num_tokens_of(int(mask.sum()))

    def losses(rows: slice) -> tuple[Tensor, PolicyStats, ValueStats]:
        policy, stats = policy_loss(new[rows], old[rows], advantages[rows], mask[rows], num_tokens=num_tokens)
        value, value_stats = value_loss(values[rows], old[rows], returns[rows], mask[rows], num_tokens=num_tokens)
        bonus = entropy(logits[rows], mask[rows], num_tokens=num_tokens)
        return policy + value - 0.1 * bonus, stats, value_stats

    whole, whole_stats, whole_value_stats = losses(slice(None))
    parts = [losses(slice(start, start + size)) for start in range(0, 4, size)]
    loss, stats, value_stats = parts[0]
    for part_loss, part_stats, part_value_stats in parts[1:]:
        loss, stats, value_stats = loss + part_loss, stats + part_stats, value_stats + part_value_stats
    inputs = (new, values, logits)
    for got, expected in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(whole, inputs), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(vars(stats), vars(whole_stats))
    torch.testing.assert_close(vars(value_stats), vars(whole_value_stats))


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.sampled_from([NAN, INF, -INF, 1e30]), st.integers(0, 3))
def test_junk_padding_and_row_order_change_neither_loss_nor_gradient(seed: int, junk: float, extra: int) -> None:
    tensors, mask = grids(seed, 3)
    order = torch.randperm(4, generator=torch.Generator().manual_seed(seed))

    def dirty(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(torch.where(mask, x, junk), (extra, extra), value=junk)[order]

    padded_mask = torch.nn.functional.pad(mask, (extra, extra))[order]
    for loss_of in (policy_loss, value_loss):
        clean_first = tensors[0].clone().requires_grad_()
        dirty_first = dirty(tensors[0]).requires_grad_()
        clean, clean_stats = loss_of(clean_first, *tensors[1:], mask)
        got, stats = loss_of(dirty_first, *map(dirty, tensors[1:]), padded_mask)
        torch.testing.assert_close(got, clean)
        torch.testing.assert_close(vars(stats), vars(clean_stats))
        gradient = gradient_of(got, dirty_first)
        torch.testing.assert_close(gradient[:, extra : extra + 6], gradient_of(clean, clean_first)[order])
        assert not gradient[~padded_mask].any()


DTYPES = st.sampled_from([torch.float32, torch.float64])


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.floats(0.01, 0.9), DTYPES)
def test_the_clip_only_ever_makes_the_policy_loss_larger_and_stops_its_gradient(
    seed: int, clip_range: float, dtype: torch.dtype
) -> None:
    grid, mask = grids(seed, 3)
    new, old, advantages = (x.to(dtype) for x in grid)
    new.requires_grad_()
    loss, stats = policy_loss(new, old, advantages, mask, clip_range, num_tokens=1)
    ratio = (new - old).detach().exp()
    unclipped = -advantages * ratio
    assert float(loss.detach()) >= float(unclipped[mask].sum()) - 1e-4
    moved_too_far = torch.where(advantages > 0, ratio > 1 + clip_range, ratio < 1 - clip_range) & mask
    # d(-A exp(d)) / dd = -A exp(d) where the clip is not in use, and nothing where it is.
    expected = torch.where(mask & ~moved_too_far, unclipped, 0.0)
    torch.testing.assert_close(gradient_of(loss, new), expected)
    assert stats.num_clipped_active == moved_too_far.sum()
    assert stats.num_clipped >= stats.num_clipped_active
    assert stats.approx_kl >= 0


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.floats(0.01, 2), DTYPES)
def test_the_clip_only_ever_makes_the_value_loss_larger_and_stops_its_gradient(
    seed: int, clip_range: float, dtype: torch.dtype
) -> None:
    grid, mask = grids(seed, 3)
    values, old, returns = (x.to(dtype) for x in grid)
    values.requires_grad_()
    loss, stats = value_loss(values, old, returns, mask, clip_range, num_tokens=1)
    plain, _ = value_loss(values, old, returns, mask, None, num_tokens=1)
    assert float(loss.detach()) >= float(plain.detach()) - 1e-4
    error = (values - returns).detach()
    clipped = values.detach().clamp(old - clip_range, old + clip_range) - returns
    in_use = mask & (clipped.abs() > error.abs())
    torch.testing.assert_close(gradient_of(loss, values), torch.where(mask & ~in_use, error, 0.0))
    assert stats.num_clipped == in_use.sum()


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.lists(st.integers(0, 2), min_size=4, max_size=4), DTYPES)
def test_rows_dealt_to_microbatches_in_any_way_add_up(seed: int, part_of_row: list[int], dtype: torch.dtype) -> None:
    """An empty microbatch, or one whose rows have no token, adds nothing."""
    grid, mask = grids(seed, 5)
    new, old, advantages, values, returns = (x.to(dtype) for x in grid)
    logits = torch.randn(4, 7, 5, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    leaves = [x.requires_grad_() for x in (new, values, logits)]
    num_tokens = int(mask.sum())

    def loss_of(rows: Tensor) -> Tensor:
        policy, _ = policy_loss(new[rows], old[rows], advantages[rows], mask[rows], num_tokens=num_tokens)
        value, _ = value_loss(values[rows], old[rows], returns[rows], mask[rows], num_tokens=num_tokens)
        return policy + 0.5 * value - 0.01 * entropy(logits[rows], mask[rows], num_tokens=num_tokens)

    parts = [loss_of((torch.tensor(part_of_row) == part).nonzero().flatten()) for part in range(3)]
    whole, dealt = loss_of(torch.arange(4)), torch.stack(parts).sum()
    torch.testing.assert_close(dealt, whole, rtol=0, atol=1e-6)
    for got, expected in zip(torch.autograd.grad(dealt, leaves), torch.autograd.grad(whole, leaves), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.integers(1, 9), st.integers(0, 8), st.floats(0, 50), st.floats(0.1, 5), DTYPES)
def test_entropy_lies_between_0_and_the_logarithm_of_what_can_be_drawn(
    seed: int, size: int, num_forbidden: int, spread: float, temperature: float, dtype: torch.dtype
) -> None:
    num_forbidden = min(num_forbidden, size - 1)
    logits = spread * torch.randn(3, size, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    logits[:, :num_forbidden] = -INF
    logits.requires_grad_()
    entropies = token_entropies(logits, temperature)
    assert (entropies >= -1e-6).all()
    assert (entropies <= math.log(size - num_forbidden) + 1e-5).all()
    gradient = gradient_of(entropies.sum(), logits)
    assert gradient.isfinite().all()
    assert not gradient[:, :num_forbidden].any()


def _join_stats_on_one_rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    (new, old, other), mask = grids(5, 3)
    rows = slice(0, 3) if rank == 0 else slice(3, 4)
    for loss_of in (policy_loss, value_loss):
        _, whole = loss_of(new, old, other, mask)
        _, own = loss_of(new[rows], old[rows], other[rows], mask[rows])
        torch.testing.assert_close(vars(own.over_ranks(dist.group.WORLD)), vars(whole))
        torch.testing.assert_close(vars(own.over_ranks(None)), vars(own))
    dist.destroy_process_group()


def test_statistics_of_two_ranks_join_as_one(tmp_path: Path) -> None:
    mp.spawn(_join_stats_on_one_rank, args=(str(tmp_path),), nprocs=2)
