"""What must not matter does not: microbatches, budgets, layouts, padding, rubbish behind the mask, the order of rows.

Two optimizer steps through the passes and the update as a run makes them, in float32, the entropy bonus on, with rows
of uneven lengths, one empty and one cut off. Compared are losses, gradients and weight changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ppo_core.advantages import gae
from ppo_core.alignment import response_mask
from ppo_core.masked import masked_whiten
from ppo_core.models.critic import CriticModel
from ppo_core.models.policy import PolicyModel
from ppo_core.rewards import per_token_rewards
from ppo_core.rollout.batch import Rollout
from ppo_core.spec import RunSpec, parse_spec
from ppo_core.training.engine import StepReport
from ppo_core.training.local import LocalEngine
from ppo_core.training.passes import forward_logprobs, forward_policy
from ppo_core.training.updates import PPOBatch, run_updates
from tests.ppo_core.tiny_models import tiny_model
from tests.ppo_core.training.made_rollouts import made_rollout

PROMPTS, RESPONSES = [3, 1, 2, 4, 2, 3, 1, 2], [5, 7, 0, 2, 12, 1, 4, 6]
SCORES = torch.tensor([0.3, -1.0, 2.0, 0.5, 1.5, -0.5, 0.0, 1.0])
TOLERANCE = 1e-6
LEARNING_RATE = 1e-3


class Recording(LocalEngine):
    """The reference engine, remembering the gradients of every step."""

    def __init__(self, policy: PolicyModel, spec: RunSpec, critic: CriticModel | None) -> None:
        super().__init__(policy, spec, critic)
        self.weights = [*policy.parameters(), *(critic.parameters() if critic is not None else ())]
        self.gradients: list[Tensor] = []

    def step(self) -> StepReport:
        parts = [each.grad.flatten() for each in self.weights if each.grad is not None]
        self.gradients.append(torch.cat(parts).clone())
        return super().step()


@dataclass(frozen=True)
class Trained:
    """What two steps left: losses and gradients of each, and how far the weights moved."""

    losses: Tensor
    gradients: Tensor
    moved: Tensor


def spec_with(update: dict[str, Any], policy: dict[str, Any]) -> RunSpec:
    common = {"learning_rate": LEARNING_RATE, "epochs": 1, "minibatches": 2, "entropy_coef": 0.01}
    return parse_spec(
        {
            "name": "toy",
            "policy": {"model": "unused", **policy},
            "data": {"prompts": "unused"},
            "rollout": {"batch_size": 8},
            "reward": {"sources": [{"kind": "python", "name": "unused"}]},
            "update": {**common, **update},
        }
    )


def made_engine(spec: RunSpec) -> Recording:
    layout, checkpointing = spec.update.row_layout, spec.policy.gradient_checkpointing
    policy = PolicyModel(tiny_model("llama"), spec.policy.value_head, layout, checkpointing).eval()
    critic = None
    if spec.policy.value_head == "separate":
        # Adam's first step is g / (|g| + 1e-8): of a gradient near 1e-7 it would show the rounding. This one has none.
        critic = CriticModel(tiny_model("llama", seed=11).base_model, layout, checkpointing).eval()
    head = policy.value_head if critic is None else critic.value_head
    assert head is not None
    nn.init.normal_(head.weight, std=0.1, generator=torch.Generator().manual_seed(3))
    return Recording(policy, spec, critic)


def rollout() -> Rollout:
    """Row 2 is empty and cut off, row 4 long and cut off."""
    made = made_rollout(PROMPTS, RESPONSES)
    return replace(made, truncated=torch.tensor([row in (2, 4) for row in range(8)]))


def trained(
    update: dict[str, Any] | None = None,
    policy: dict[str, Any] | None = None,
    rows: Rollout | None = None,
    scores: Tensor = SCORES,
    dirty: Callable[[PPOBatch], PPOBatch] = lambda batch: batch,
) -> Trained:
    spec = spec_with(update or {}, policy or {})
    rows = rows or rollout()
    engine = made_engine(spec)
    reference = PolicyModel(tiny_model("llama", seed=1)).eval()
    start = [each.detach().clone() for each in engine.weights]
    old = forward_policy(engine, rows, spec, lambda: None)
    ref_logprobs = forward_logprobs(reference, rows, old.plan, spec, lambda: None)
    rewards, _ = per_token_rewards(
        scores, old.logprobs, ref_logprobs, rows.response_mask, 0.05, "k1", rows.truncated, -1.0
    )
    advantages, returns = gae(rewards, old.values, rows.response_mask)
    batch = PPOBatch(rows, old, masked_whiten(advantages, rows.response_mask), returns)
    report = run_updates(engine, dirty(batch), spec, iteration=1)
    assert report.num_steps == 2
    losses = [value for each in report.minibatches for value in (each.policy_loss, each.value_loss, each.entropy)]
    moved = [(now - then).detach().flatten() for now, then in zip(engine.weights, start, strict=True)]
    return Trained(torch.tensor(losses), torch.cat(engine.gradients), torch.cat(moved))


def assert_same(one: Trained, other: Trained) -> None:
    assert float(one.moved.abs().max()) >= 1e-3
    for name in ("losses", "gradients", "moved"):
        a, b = getattr(one, name), getattr(other, name)
        gap = float(((a - b).abs() / a.abs().clamp(min=1)).max())
        assert gap <= TOLERANCE, f"{name} differ by {gap:.2g}"


@pytest.fixture(scope="module")
def whole() -> Trained:
    """Each minibatch is one padded microbatch."""
    return trained()


@pytest.mark.parametrize("token_budget", [1, 13, 24, 40, 60, 1000])
def test_the_token_budget_changes_nothing(whole: Trained, token_budget: int) -> None:
    """T27: 1 x 8 = 2 x 4 = 8 x 1 rows, and anything between."""
    assert_same(whole, trained({"token_budget": token_budget}))


@pytest.mark.parametrize("token_budget", [1, 30, 1000])
def test_packed_rows_are_padded_rows(whole: Trained, token_budget: int) -> None:
    assert_same(whole, trained({"pack_rows": True, "token_budget": token_budget}))


def test_checkpointed_layers_change_nothing(whole: Trained) -> None:
    assert_same(whole, trained(policy={"gradient_checkpointing": True}))


def test_microbatches_of_a_separate_critic_change_nothing() -> None:
    separate = {"value_head": "separate"}
    assert_same(trained(policy=separate), trained({"token_budget": 24}, separate))


def placed(rows: Rollout, offsets: list[int], width: int) -> Rollout:
    """The same rows, each begun at a column of its own, rubbish in every column that is not theirs."""
    ids = torch.randint(0, 64, (rows.num_rows, width), generator=torch.Generator().manual_seed(9))
    attention = torch.zeros(rows.num_rows, width, dtype=torch.long)
    for row, offset in enumerate(offsets):
        length = int(rows.lengths[row])
        ids[row, offset : offset + length] = rows.input_ids[row, :length]
        attention[row, offset : offset + length] = 1
    start = rows.response_start + torch.tensor(offsets)
    return replace(
        rows,
        input_ids=ids,
        attention_mask=attention,
        response_start=start,
        response_mask=response_mask(attention, start, rows.response_length),
    )


@pytest.mark.parametrize("token_budget", [24, 1000])
@pytest.mark.parametrize("pack_rows", [False, True])
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padding_on_any_side_changes_nothing(whole: Trained, side: str, pack_rows: bool, token_budget: int) -> None:
    rows, width = rollout(), 21
    room = [width - int(length) for length in rows.lengths]
    offsets = {"left": room, "right": [0] * 8, "both": [left // 2 for left in room]}[side]
    moved = placed(rows, offsets, width)
    assert_same(whole, trained({"pack_rows": pack_rows, "token_budget": token_budget}, rows=moved))


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -1e30])
def test_what_stands_behind_the_mask_changes_nothing(whole: Trained, rubbish: float) -> None:
    def dirty(batch: PPOBatch) -> PPOBatch:
        def fill(tensor: Tensor) -> Tensor:
            return torch.where(batch.rollout.response_mask, tensor, rubbish)

        old = replace(batch.old, logprobs=fill(batch.old.logprobs), values=fill(batch.old.values))
        return PPOBatch(batch.rollout, old, fill(batch.advantages), fill(batch.returns))

    assert_same(whole, trained(dirty=dirty))


def test_the_order_of_rows_changes_nothing() -> None:
    """One minibatch an epoch: with more, the seeded permutation deals other rows together."""
    order = torch.tensor([5, 2, 7, 0, 3, 6, 1, 4])
    one = {"minibatches": 1, "epochs": 2}
    assert_same(trained(one), trained(one, rows=rollout().select(order), scores=SCORES[order]))
