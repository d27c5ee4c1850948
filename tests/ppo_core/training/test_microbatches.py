"""Rows are dealt out whole: each once an epoch, microbatches within the token budget and cut to their own width."""

from __future__ import annotations

import pytest
import torch

from ppo_core.training.microbatches import microbatches, minibatch_rows
from tests.ppo_core.training.made_rollouts import made_rollout


@pytest.mark.parametrize(("num_rows", "parts", "sizes"), [(5, 4, [2, 1, 1, 1]), (10, 4, [3, 3, 2, 2]), (8, 8, [1] * 8)])
def test_minibatches_use_every_row_once_and_differ_by_at_most_one(num_rows: int, parts: int, sizes: list[int]) -> None:
    """T11: never three steps when four were asked for."""
    for epoch in range(2):
        dealt = minibatch_rows(num_rows, parts, seed=1, iteration=3, epoch=epoch)
        assert [len(rows) for rows in dealt] == sizes
        assert sorted(torch.cat(dealt).tolist()) == list(range(num_rows))


def test_the_order_follows_seed_iteration_and_epoch() -> None:
    def order(seed: int, iteration: int, epoch: int) -> list[int]:
        return torch.cat(minibatch_rows(32, 4, seed, iteration, epoch)).tolist()

    assert order(1, 1, 0) == order(1, 1, 0)
    assert len({tuple(order(*place)) for place in [(1, 1, 0), (2, 1, 0), (1, 2, 0), (1, 1, 1)]}) == 4


def test_microbatches_stay_within_the_budget_and_hold_every_row_once() -> None:
    rollout = made_rollout(prompt_lengths=[3, 2, 4, 1, 2], response_lengths=[5, 0, 9, 1, 3])
    parts = microbatches(rollout, torch.arange(5), token_budget=20)
    assert sorted(torch.cat([part.rows for part in parts]).tolist()) == [0, 1, 2, 3, 4]
    for part in parts:
        assert part.input_ids.shape[1] == int(rollout.lengths[part.rows].max())
        assert part.input_ids.numel() <= 20
        assert torch.equal(part.mask.sum(1), rollout.response_length[part.rows])


def test_a_row_longer_than_the_budget_stands_alone() -> None:
    rollout = made_rollout(prompt_lengths=[3, 3], response_lengths=[9, 1])
    assert [len(part.rows) for part in microbatches(rollout, torch.arange(2), token_budget=5)] == [1, 1]


def test_longest_rows_come_first() -> None:
    rollout = made_rollout(prompt_lengths=[1, 1, 1], response_lengths=[2, 9, 5])
    parts = microbatches(rollout, torch.tensor([0, 1, 2]), token_budget=1)
    assert [int(part.rows) for part in parts] == [1, 2, 0]
