"""Rows are dealt out whole: each once an epoch, microbatches within the token budget and cut to their own width."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_core.models.trunk import RowLayout
from ppo_core.training.microbatches import (
    microbatches,
    minibatch_rows,
    minibatches_of_microbatches,
    plan_with_at_least,
)
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


LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=20)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 60), st.sampled_from(["padded", "packed"]))
def test_any_rows_are_dealt_out_once_and_within_the_budget(
    lengths: list[tuple[int, int]], budget: int, layout: RowLayout
) -> None:
    rollout = made_rollout([prompt for prompt, _ in lengths], [response for _, response in lengths])
    parts = microbatches(rollout, torch.arange(len(lengths)), budget, layout)
    assert sorted(row for part in parts for row in part.rows.tolist()) == list(range(len(lengths)))
    for part in parts:
        tokens = part.attention_mask.sum() if layout == "packed" else part.attention_mask.numel()
        assert len(part.rows) == 1 or int(tokens) <= budget
        # Cut to its rows, and nothing of them is lost.
        assert bool(part.attention_mask.any(dim=0).all())
        assert torch.equal(part.attention_mask.sum(1), rollout.lengths[part.rows])
        assert torch.equal(part.cut(rollout.response_mask), part.mask)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 3))
def test_any_number_of_minibatches_uses_every_row_once(num_rows: int, parts: int, epoch: int) -> None:
    dealt = minibatch_rows(num_rows, parts, seed=2, iteration=1, epoch=epoch)
    assert len(dealt) == parts
    assert sorted(torch.cat(dealt).tolist()) == list(range(num_rows))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(1, 60), st.integers(1, 8))
def test_a_kept_plan_has_a_part_for_each_step_where_there_are_rows_enough(
    lengths: list[tuple[int, int]], budget: int, steps: int
) -> None:
    rollout = made_rollout([prompt for prompt, _ in lengths], [response for _, response in lengths])
    plan = plan_with_at_least(steps, rollout, budget)
    assert len(plan) >= min(steps, len(lengths))
    assert sorted(row for part in plan for row in part.rows.tolist()) == list(range(len(lengths)))


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_every_rank_has_a_microbatch_in_every_round(layout: RowLayout, num_ranks: int) -> None:
    """T28: also where rows are fewer than ranks; each row is dealt out once, and no microbatch is over the budget."""
    rollout = made_rollout([2] * 5, [1, 4, 9, 2, 7])
    parts = microbatches(rollout, torch.arange(5), 12, layout, num_ranks)
    assert len(parts) % num_ranks == 0
    real = [part for part in parts if part.mask.any()]
    assert sorted(row for part in real for row in part.rows.tolist()) == [0, 1, 2, 3, 4]
    for part in real:
        tokens = part.input_ids.numel() if layout == "padded" else int(part.attention_mask.sum())
        assert tokens <= 12 or len(part.rows) == 1
    longest = [int(part.attention_mask.sum(dim=1).max()) for part in parts[::num_ranks]]
    assert longest == sorted(longest, reverse=True)


def test_kept_rounds_are_permuted_whole() -> None:
    rollout = made_rollout([2] * 8, list(range(1, 9)))
    plan = plan_with_at_least(3, rollout, 1000, num_ranks=2)
    assert len(plan) >= 6
    rounds = {(id(first), id(second)) for first, second in zip(plan[::2], plan[1::2], strict=True)}
    for epoch in range(3):
        parts = minibatches_of_microbatches(plan, 3, 1, 1, epoch, num_ranks=2)
        assert len(parts) == 3
        dealt = [pair for part in parts for pair in zip(part[::2], part[1::2], strict=True)]
        assert {(id(first), id(second)) for first, second in dealt} == rounds
