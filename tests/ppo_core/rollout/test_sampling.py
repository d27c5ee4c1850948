"""Sampling: streams by seed, and exactly the softmax's distribution."""

from __future__ import annotations

import pytest
import torch

from ppo_core.rollout.sampling import drawable_tokens, sample_tokens, uniform_draws


def test_a_row_of_draws_is_its_seeds_alone() -> None:
    several = uniform_draws([3, 2**62, 5], 7)
    assert torch.equal(several[1], uniform_draws([2**62], 9)[0, :7])
    assert not torch.equal(several[0], several[2])
    assert several.dtype == torch.float64
    assert 0 <= several.min() <= several.max() < 1


def test_a_draw_becomes_the_token_where_the_cumulative_distribution_passes_it() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(6, 3)
    draws = torch.tensor([0.0, 0.499, 0.501, 0.799, 0.801, 1 - 2**-53], dtype=torch.float64)
    tokens, logprobs = sample_tokens(logits, 1.0, draws)
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2]
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.5, 0.5, 0.3, 0.3, 0.2, 0.2]))


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(3, 5)
    draws = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert sample_tokens(logits, 1.0, draws)[0].tolist() == [1, 3, 3]


def test_frequencies_are_the_distributions() -> None:
    """Chi-squared of 64 tokens over 200,000 draws: 63 degrees of freedom, 114 has a chance of one in 10,000."""
    logits = torch.randn(64, generator=torch.Generator().manual_seed(1)) * 2
    num_draws = 200_000
    tokens, _ = sample_tokens(logits.expand(num_draws, 64), 0.8, uniform_draws([7], num_draws)[0])
    expected = (logits.double() / 0.8).softmax(0) * num_draws
    counts = torch.bincount(tokens, minlength=64).double()
    assert ((counts - expected).square() / expected).sum() < 114


def test_temperature_divides_the_logits() -> None:
    tokens, logprobs = sample_tokens(torch.tensor([[2.0, 1.0, 0.0]]), 0.5, torch.tensor([0.9], dtype=torch.float64))
    assert tokens.item() == 1
    torch.testing.assert_close(logprobs, torch.tensor([-2.1429]), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("top_p", "top_k", "forbidden", "kept"),
    [
        (1.0, 0, [], [0, 1, 2, 3]),
        (0.4, 0, [], [0]),
        (0.41, 0, [], [0, 1]),  # the first alone has .4
        (0.7, 0, [], [0, 1]),
        (0.001, 0, [], [0]),
        (1.0, 2, [], [0, 1]),
        (1.0, 9, [], [0, 1, 2, 3]),
        (1.0, 0, [0], [1, 2, 3]),
        (0.5, 0, [0], [1]),  # .3 of .6
        (0.6, 3, [], [0, 1]),
        (0.5, 2, [0], [1]),  # .3 of .5
        (0.61, 2, [0], [1, 2]),
    ],
)
def test_which_tokens_may_be_drawn(top_p: float, top_k: int, forbidden: list[int], kept: list[int]) -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    banned = torch.tensor(forbidden, dtype=torch.long)
    # A little less than the sums, so that rounding decides nothing.
    found = drawable_tokens(logits, 1.0, top_p - 1e-7 if top_p < 1 else 1.0, top_k, banned)
    assert found[0].nonzero().flatten().tolist() == kept


def test_temperature_decides_the_nucleus_too() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    nothing = torch.tensor([], dtype=torch.long)
    assert drawable_tokens(logits, 1.0, 0.8, 0, nothing).sum() == 2
    assert drawable_tokens(logits, 0.5, 0.8, 0, nothing).sum() == 1


def test_of_equal_tokens_the_lower_ids_are_kept() -> None:
    found = drawable_tokens(torch.zeros(2, 5), 1.0, 1.0, 2, torch.tensor([0]))
    assert found.tolist() == [[False, True, True, False, False]] * 2
