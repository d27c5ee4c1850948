"""Per-token rewards: the KL estimators, where the score goes, and what an empty answer gets."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_core.errors import ShapeError
from ppo_core.masked import masked_row_sum
from ppo_core.rewards import kl_penalty, per_token_rewards


def test_estimators_by_hand() -> None:
    old, ref = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])  # d = 0.5 and -1
    assert kl_penalty(old, ref).tolist() == [[0.5, -1.0]]
    assert kl_penalty(old, ref, "k2").tolist() == [[0.125, 0.5]]
    expected = torch.tensor([[math.exp(-0.5) - 0.5, math.e - 2]])
    torch.testing.assert_close(kl_penalty(old, ref, "k3"), expected)


def test_k3_of_a_tiny_difference_is_half_its_square() -> None:
    old = torch.tensor([[1e-6]], dtype=torch.float64)
    assert kl_penalty(old, torch.zeros_like(old), "k3").item() == pytest.approx(5e-13, rel=1e-3)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_k2_and_k3_are_never_negative(estimator: str) -> None:
    difference = torch.linspace(-20, 20, 401).unsqueeze(0)
    assert (kl_penalty(difference, torch.zeros_like(difference), estimator) >= 0).all()


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="'k4' is unknown: k1, k2 or k3"):
        kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), "k4")


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [(torch.float32, torch.float32), (torch.float64, torch.float64), (torch.bfloat16, torch.float32)],
)
def test_dtype_is_that_of_the_logprobs(dtype: torch.dtype, kept: torch.dtype) -> None:
    logprobs = torch.zeros(1, 2, dtype=dtype)
    assert kl_penalty(logprobs, logprobs).dtype == kept
    results = per_token_rewards(torch.ones(1, dtype=torch.float64), logprobs, logprobs, torch.ones(1, 2), 0.1)
    assert {result.dtype for result in results} == {kept}


def test_the_score_lands_on_the_last_real_token() -> None:
    """T02: huggingface/trl#1893. Lengths 3 and 5 on a grid of 7 after a prompt of 2: scores at index 3 and 5 alone."""
    mask = torch.tensor([[0, 1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 1, 0]])
    zeros = torch.zeros(2, 7)
    rewards, kl = per_token_rewards(torch.tensor([1.0, 2.0]), zeros, zeros, mask, kl_coef=0.0)
    assert rewards.nonzero().tolist() == [[0, 3], [1, 5]]
    assert masked_row_sum(rewards, mask).tolist() == [1.0, 2.0]
    assert not kl.any()


def test_kl_is_charged_on_every_response_token_and_only_there() -> None:
    old, ref = torch.full((1, 4), -1.0), torch.full((1, 4), -1.5)
    rewards, kl = per_token_rewards(torch.tensor([1.0]), old, ref, torch.tensor([[0, 1, 1, 0]]), kl_coef=0.1)
    torch.testing.assert_close(rewards, torch.tensor([[0.0, -0.05, 0.95, 0.0]]))
    assert kl.tolist() == [[0.0, 0.5, 0.5, 0.0]]


def test_the_missing_eos_penalty_is_added_to_cut_off_answers() -> None:
    zeros, mask = torch.zeros(2, 2), torch.ones(2, 2)
    rewards, _ = per_token_rewards(
        torch.tensor([1.0, 1.0]),
        zeros,
        zeros,
        mask,
        0.0,
        missing_eos=torch.tensor([False, True]),
        missing_eos_penalty=-1.5,
    )
    assert rewards.tolist() == [[0.0, 1.0], [0.0, -0.5]]


def test_an_empty_response_gets_nothing_anywhere() -> None:
    """Its score, NaN as often as not, must not turn up in any column; a single EOS carries its own score."""
    zeros, mask = torch.zeros(3, 3), torch.tensor([[1, 0, 0], [1, 1, 1], [0, 0, 0]])
    rewards, _ = per_token_rewards(
        torch.tensor([5.0, 6.0, math.nan]),
        zeros,
        zeros,
        mask,
        0.1,
        missing_eos=torch.tensor([False, False, True]),
        missing_eos_penalty=-1.0,
    )
    assert rewards.tolist() == [[5.0, 0.0, 0.0], [0.0, 0.0, 6.0], [0.0, 0.0, 0.0]]


def test_a_gap_does_not_hide_the_last_token() -> None:
    zeros = torch.zeros(1, 5)
    rewards, _ = per_token_rewards(torch.tensor([1.0]), zeros, zeros, torch.tensor([[1, 0, 0, 1, 0]]), 0.1)
    assert rewards.tolist() == [[0.0, 0.0, 0.0, 1.0, 0.0]]


def test_shapes_must_agree() -> None:
    grid, scores = torch.zeros(2, 3), torch.zeros(2)
    with pytest.raises(ShapeError):
        kl_penalty(grid, torch.zeros(2, 1))
    with pytest.raises(ShapeError, match="ref_logprobs"):
        per_token_rewards(scores, grid, torch.zeros(2, 4), grid, 0.1)
    with pytest.raises(ShapeError, match="scores"):
        per_token_rewards(torch.zeros(2, 1), grid, grid, grid, 0.1)
    with pytest.raises(ShapeError, match="missing_eos"):
        per_token_rewards(scores, grid, grid, grid, 0.1, missing_eos=torch.zeros(3))
    with pytest.raises(ShapeError, match=r"expected \[B, T\]"):
        per_token_rewards(scores, scores, scores, scores, 0.1)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.integers(2, 9))
def test_k1_and_k3_have_the_kl_as_their_mean(seed: int, size: int) -> None:
    """Every outcome once, weighted by its probability: both means are sum p (log p - log q), exactly."""
    generator = torch.Generator().manual_seed(seed)
    log_p, log_q = (
        (2 * torch.randn(1, size, generator=generator, dtype=torch.float64)).log_softmax(-1) for _ in range(2)
    )
    kl = float((log_p.exp() * (log_p - log_q)).sum())
    for estimator in ("k1", "k3"):
        assert float((log_p.exp() * kl_penalty(log_p, log_q, estimator)).sum()) == pytest.approx(kl, abs=1e-12)


@settings(deadline=None, max_examples=50)
@given(
    st.integers(0, 10_000),
    st.sampled_from(["k1", "k2", "k3"]),
    st.floats(0, 2),
    st.floats(-5, 0),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_a_rows_rewards_add_up_to_its_score_less_its_kl(
    seed: int, estimator: str, kl_coef: float, penalty: float, dtype: torch.dtype
) -> None:
    """Nothing is lost or counted twice, wherever the response lies in its row."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(4, 6, generator=generator) < 0.5
    old, ref = (torch.randn(4, 6, generator=generator, dtype=dtype) for _ in range(2))
    scores = torch.randn(4, generator=generator, dtype=dtype)
    cut_off = torch.rand(4, generator=generator) < 0.5
    rewards, kl = per_token_rewards(
        scores, old, ref, mask, kl_coef, estimator, missing_eos=cut_off, missing_eos_penalty=penalty
    )
    expected = scores + penalty * cut_off - kl_coef * masked_row_sum(kl, mask)
    expected = torch.where(mask.any(1), expected, 0.0)
    torch.testing.assert_close(masked_row_sum(rewards, mask), expected, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=50)
@given(
    st.integers(0, 10_000),
    st.sampled_from(["k1", "k2", "k3"]),
    st.sampled_from([math.nan, math.inf, -math.inf]),
    st.integers(0, 3),
)
def test_junk_and_padding_change_nothing(seed: int, estimator: str, junk: float, extra: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(3, 6, generator=generator) < 0.6
    old, ref = (torch.randn(3, 6, generator=generator) for _ in range(2))
    scores = torch.randn(3, generator=generator)
    clean = per_token_rewards(scores, old, ref, mask, 0.2, estimator)

    def dirty(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(torch.where(mask, x, junk), (extra, extra), value=junk)

    padded_mask = torch.nn.functional.pad(mask, (extra, extra))
    order = torch.randperm(3, generator=generator)
    results = per_token_rewards(scores[order], dirty(old)[order], dirty(ref)[order], padded_mask[order], 0.2, estimator)
    for got, expected in zip(results, clean, strict=True):
        assert torch.equal(got[:, extra : extra + 6], expected[order])
        assert not got[~padded_mask[order]].any()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_equal_logprobs_have_no_kl(estimator: str) -> None:
    logprobs = torch.tensor([[-1e-8, -0.7, -30.0]])
    assert not kl_penalty(logprobs, logprobs, estimator).any()
