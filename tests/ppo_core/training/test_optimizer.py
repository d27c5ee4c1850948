"""Float32 masters under bfloat16 weights, and one joint norm for each optimizer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from ppo_core.models.critic import CriticModel
from ppo_core.models.policy import PolicyModel
from ppo_core.spec import RunSpec, parse_spec
from ppo_core.training.local import LocalEngine
from ppo_core.training.microbatches import minibatches_of_microbatches, plan_with_at_least
from ppo_core.training.optimizer import ClippedAdamW, MasterWeights
from ppo_core.training.passes import forward_policy
from ppo_core.training.updates import run_updates
from tests.ppo_core.tiny_models import tiny_model
from tests.ppo_core.training.engine_state import whole_state
from tests.ppo_core.training.made_rollouts import made_rollout
from tests.ppo_core.training.test_updates import PROMPTS, RESPONSES, made_batch, made_spec


def spec_of(policy: dict[str, Any], **update: Any) -> RunSpec:
    data = made_spec(**update).model_dump()
    return parse_spec({**data, "policy": {**data["policy"], **policy}})


def bfloat16_engine(spec: RunSpec) -> LocalEngine:
    return LocalEngine(PolicyModel(tiny_model().bfloat16()).eval(), spec)


def test_steps_too_small_for_bfloat16_add_up_in_the_master() -> None:
    """bfloat16 has 8 bits: 1 + 0.001 is 1, a hundred times over."""
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    masters = MasterWeights([("w", weight)])
    master = masters.by_name["w"]
    for _ in range(100):
        with torch.no_grad():
            master += 1e-3
        masters.copy_to_weights()
    assert master.item() == pytest.approx(1.1, abs=1e-5)
    assert weight.item() == pytest.approx(1.1, abs=2**-8)


def test_gradients_of_microbatches_add_up_in_float32() -> None:
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    master = MasterWeights([("w", weight)]).by_name["w"]
    for factor in (1.0, 2**-9, 2**-9):  # each alone would be rounded away beside the 1
        (weight * factor).sum().backward()
    assert master.grad is not None
    assert master.grad.item() == 1 + 2**-8
    assert weight.grad is None


def test_a_float32_weight_is_its_own_master() -> None:
    weight = nn.Parameter(torch.ones(1))
    assert MasterWeights([("w", weight)]).by_name["w"] is weight


def test_in_bfloat16_the_ratio_is_one_and_nothing_is_clipped_at_any_minibatch() -> None:
    """T20: rate so small that no weight moves. Kept microbatches give every epoch's ratio of exactly 1."""
    spec = spec_of({"dtype": "bfloat16"}, learning_rate=1e-12, epochs=3, minibatches=4, token_budget=24)
    engine = bfloat16_engine(spec)
    report = run_updates(engine, made_batch(engine, spec), spec, iteration=1)
    assert len(report.minibatches) == 12
    assert all(float(each.policy.max_ratio_deviation) == 0 for each in report.minibatches)
    assert all(float(each.policy.clip_fraction) == 0 for each in report.minibatches)


def test_bfloat16_weights_are_the_rounded_masters_after_training_and_after_loading() -> None:
    spec = spec_of({"dtype": "bfloat16"})
    first = bfloat16_engine(spec)
    run_updates(first, made_batch(first, spec), spec, iteration=1)
    state = {name: tensor.clone() for name, tensor in whole_state(first).items()}
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    second = bfloat16_engine(spec)
    second.load_state(state, first.num_steps)
    for engine in (first, second):
        for name, weight in engine.policy.named_parameters():
            assert torch.equal(weight, state[f"master/{name}"].to(weight.dtype))
        run_updates(engine, made_batch(engine, spec), spec, iteration=2)
    ends = [whole_state(engine) for engine in (first, second)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.parametrize("minibatches", [2, 3, 5, 8])
def test_a_kept_plan_has_a_microbatch_for_every_step_and_every_row_once(minibatches: int) -> None:
    rollout = made_rollout(PROMPTS, RESPONSES)
    plan = plan_with_at_least(minibatches, rollout, token_budget=1000)
    for epoch in range(2):
        parts = minibatches_of_microbatches(plan, minibatches, 1, 1, epoch)
        assert len(parts) == minibatches
        assert all(parts)
        assert sorted(row for part in parts for each in part for row in each.rows.tolist()) == list(range(8))


def test_policy_and_critic_are_clipped_by_norms_of_their_own() -> None:
    """A critic whose gradient is huge must not make the policy's step small (one joint norm per optimizer)."""

    def moved(value_coef: float) -> tuple[list[torch.Tensor], float, float]:
        spec = spec_of({"value_head": "separate"}, value_coef=value_coef, epochs=1, minibatches=1, max_grad_norm=0.1)
        policy = PolicyModel(tiny_model(), "separate").eval()
        engine = LocalEngine(policy, spec, CriticModel(tiny_model(seed=5).base_model).eval())
        report = run_updates(engine, made_batch(engine, spec), spec, iteration=1).minibatches[0]
        return [each.detach().clone() for each in policy.parameters()], report.grad_norm, report.value_grad_norm

    small, small_norm, small_value_norm = moved(1.0)
    large, large_norm, large_value_norm = moved(1000.0)
    assert all(torch.equal(a, b) for a, b in zip(small, large, strict=True))
    assert small_norm == large_norm
    assert large_value_norm == pytest.approx(1000 * small_value_norm, rel=1e-4)


def test_a_non_finite_gradient_of_the_critic_moves_neither() -> None:
    spec = spec_of({"value_head": "separate"})
    critic = CriticModel(tiny_model(seed=5).base_model).eval()
    engine = LocalEngine(PolicyModel(tiny_model(), "separate").eval(), spec, critic)
    batch = made_batch(engine, spec)
    before = {name: tensor.clone() for name, tensor in whole_state(engine).items()}
    part = batch.old.plan[0]
    output = engine.forward(part, entropy="none")
    engine.backward(output.logprobs.sum(), output.values.sum() * math.nan)
    report = engine.step()
    assert not report.applied
    assert math.isfinite(report.grad_norm)
    assert math.isnan(report.value_grad_norm)
    after = whole_state(engine)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_the_joint_norm_is_over_all_groups() -> None:
    one, other = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    one.grad, other.grad = torch.tensor([3.0]), torch.tensor([4.0])
    optimizer = ClippedAdamW([([one], 0.1), ([other], 0.1)], max_grad_norm=1.0)
    assert optimizer.clip() == pytest.approx(5.0)
    assert one.grad.item() == pytest.approx(0.6)
    assert other.grad.item() == pytest.approx(0.8)


def test_the_old_pass_of_a_separate_critic_has_its_values() -> None:
    spec = spec_of({"value_head": "separate"})
    critic = CriticModel(tiny_model(seed=5).base_model).eval()
    nn.init.constant_(critic.value_head.bias, 2.0)
    engine = LocalEngine(PolicyModel(tiny_model(), "separate").eval(), spec, critic)
    rollout = made_rollout(PROMPTS, RESPONSES)
    values = forward_policy(engine, rollout, spec, lambda: None).values
    assert torch.equal(values, 2.0 * rollout.response_mask)


def test_moments_of_a_checkpoint_are_copies_beside_their_weight() -> None:
    weight = torch.zeros(2, requires_grad=True)
    saved = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
    optimizer = ClippedAdamW([([weight], 0.1)], max_grad_norm=1.0)
    optimizer.take_moments(weight, saved)
    weight.grad = torch.ones(2)
    optimizer.step(1.0)
    assert float(saved["step"]) == 3
    assert {each.device for each in optimizer.moments(weight).values()} == {weight.device}
    assert float(optimizer.moments(weight)["step"]) == 4
