"""Epochs and steps on a tiny policy: how many, by what gradient, and when they are refused or skipped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ppo_core.advantages import gae
from ppo_core.errors import NonFiniteError, RatioError
from ppo_core.masked import masked_whiten
from ppo_core.models.critic import CriticModel
from ppo_core.models.loading import load_policy
from ppo_core.models.policy import PolicyModel
from ppo_core.rollout.batch import Rollout
from ppo_core.spec import RunSpec, parse_spec
from ppo_core.spec.groups import PolicyConfig
from ppo_core.training.local import LocalEngine
from ppo_core.training.passes import forward_policy
from ppo_core.training.updates import PPOBatch, run_updates
from tests.ppo_core.tiny_models import tiny_model
from tests.ppo_core.training.engine_state import whole_state
from tests.ppo_core.training.made_rollouts import made_rollout

PROMPTS, RESPONSES = [3, 1, 2, 4, 2, 3, 1, 2], [5, 7, 0, 2, 8, 1, 4, 6]


def made_spec(**update: Any) -> RunSpec:
    return parse_spec(
        {
            "name": "toy",
            "policy": {"model": "unused"},
            "data": {"prompts": "unused"},
            "rollout": {"batch_size": 8},
            "reward": {"sources": [{"kind": "python", "name": "unused"}]},
            "update": {"learning_rate": 3e-3, "minibatches": 2, **update},
        }
    )


def made_engine(spec: RunSpec) -> LocalEngine:
    policy = PolicyModel(tiny_model("llama"), "shared").eval()
    nn.init.normal_(policy.value_head.weight, std=0.1, generator=torch.Generator().manual_seed(3))
    return LocalEngine(policy, spec)


def made_batch(engine: LocalEngine, spec: RunSpec, rollout: Rollout | None = None) -> PPOBatch:
    rollout = rollout or made_rollout(PROMPTS, RESPONSES)
    old = forward_policy(engine, rollout, spec, lambda: None)
    rewards = torch.randn(rollout.response_mask.shape, generator=torch.Generator().manual_seed(5))
    advantages, returns = gae(rewards, old.values, rollout.response_mask)
    return PPOBatch(rollout, old, masked_whiten(advantages, rollout.response_mask), returns)


def weights(engine: LocalEngine) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in engine.policy.parameters()])


def trained(**update: Any) -> Tensor:
    spec = made_spec(**update)
    engine = made_engine(spec)
    run_updates(engine, made_batch(engine, spec), spec, iteration=1)
    return weights(engine)


def test_there_are_epochs_times_minibatches_steps() -> None:
    spec = made_spec(epochs=3, minibatches=4)
    engine = made_engine(spec)
    report = run_updates(engine, made_batch(engine, spec), spec, iteration=1)
    assert [len(epoch) for epoch in report.epochs] == [4, 4, 4]
    assert report.num_steps == engine.num_steps == 12


def test_the_first_minibatch_has_ratio_one() -> None:
    spec = made_spec()
    engine = made_engine(spec)
    report = run_updates(engine, made_batch(engine, spec), spec, iteration=1)
    assert float(report.minibatches[0].policy.max_ratio_deviation) < 1e-4
    assert float(report.minibatches[-1].policy.max_ratio_deviation) > 1e-3


@pytest.mark.parametrize("entropy_coef", [0.0, 0.01])
def test_the_token_budget_does_not_change_what_is_learned(entropy_coef: float) -> None:
    """1 x 8 = 2 x 4 = 8 x 1 microbatches, uneven lengths, one empty row (T27)."""
    start = weights(made_engine(made_spec()))
    whole = trained(token_budget=4096, entropy_coef=entropy_coef)
    assert float((whole - start).abs().max()) >= 1e-3
    for budget in (24, 1):
        other = trained(token_budget=budget, entropy_coef=entropy_coef)
        gap = (other - whole).abs() / torch.maximum(torch.ones_like(whole), whole.abs())
        assert float(gap.max()) <= 5e-6


def test_an_epoch_breaks_at_the_target_kl() -> None:
    spec = made_spec(epochs=4, learning_rate=0.02, target_kl=1e-3)
    engine = made_engine(spec)
    report = run_updates(engine, made_batch(engine, spec), spec, iteration=1)
    assert report.stopped_at_target_kl
    assert report.num_steps < 8


@pytest.mark.parametrize(("num_rows", "sizes"), [(5, [1, 1, 1, 2]), (10, [2, 2, 3, 3])])
def test_four_minibatches_are_four_steps_an_epoch_whatever_the_batch(num_rows: int, sizes: list[int]) -> None:
    """T11: ikostrikov/pytorch-a2c-ppo-acktr-gail#176. Five lengths are powers of two, so tokens tell rows."""
    spec = made_spec(minibatches=4, epochs=2)
    engine = made_engine(spec)
    lengths = [2**row for row in range(5)] if num_rows == 5 else [1] * 10
    report = run_updates(engine, made_batch(engine, spec, made_rollout([2] * num_rows, lengths)), spec, iteration=1)
    assert [len(epoch) for epoch in report.epochs] == [4, 4]
    assert report.num_steps == engine.num_steps == 8
    for epoch in report.epochs:
        tokens = [int(each.num_tokens) for each in epoch]
        assert sum(tokens) == sum(lengths)
        assert sorted(number.bit_count() if num_rows == 5 else number for number in tokens) == sizes


def test_a_minibatch_without_a_token_is_counted_and_makes_no_step() -> None:
    """T10: alibaba/ROLL#475. Nothing to average over is no step, and is told."""
    spec = made_spec(epochs=1, minibatches=4)
    engine = made_engine(spec)
    batch = made_batch(engine, spec, made_rollout([2, 2, 2, 2], [0, 0, 3, 4]))
    report = run_updates(engine, batch, spec, iteration=1)
    assert (report.num_steps, report.num_empty, len(report.skipped)) == (2, 2, 0)


def test_a_non_finite_gradient_is_skipped_and_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """T21: step 3 only, then from step 5 on always."""
    spec = made_spec(epochs=2, minibatches=4, max_skipped_steps=2)
    engine = made_engine(spec)
    batch = made_batch(engine, spec)
    calls = 0
    backward: Callable[[Tensor | None, Tensor], None] = engine.backward

    def poisoned(policy_loss: Tensor | None, value_loss: Tensor) -> None:
        nonlocal calls
        calls += 1
        backward(policy_loss, value_loss * float("nan") if calls == 3 or calls >= 5 else value_loss)

    monkeypatch.setattr(engine, "backward", poisoned)
    with pytest.raises(NonFiniteError, match="in 2 optimizer steps in a row"):
        run_updates(engine, batch, spec, iteration=7)
    assert engine.num_steps == 3
    assert bool(torch.isfinite(weights(engine)).all())


def test_dropout_in_the_config_and_other_batch_shapes_leave_the_ratio_at_one(tmp_path: Path) -> None:
    """T06: CarperAI/trlx#107. Scored four at a time, padded to 20; updated one by one, at each row's own length."""
    tiny_model("gpt2", resid_pdrop=0.1, attn_pdrop=0.1, embd_pdrop=0.1).save_pretrained(tmp_path)
    scored, updated = (
        made_spec(minibatches=1, epochs=1, learning_rate=1e-12, token_budget=budget) for budget in (80, 1)
    )
    engine = LocalEngine(load_policy(PolicyConfig(model=str(tmp_path))), updated)
    batch = made_batch(engine, scored, made_rollout([4, 3, 2, 1], [16, 8, 6, 4]))
    assert [part.input_ids.shape for part in batch.old.plan] == [(4, 20)]
    (report,) = run_updates(engine, batch, updated, iteration=1).minibatches
    assert float(report.policy.max_ratio_deviation) < 1e-3
    assert float(report.policy.clip_fraction) == 0
    assert float(report.policy.approx_kl) < 1e-6


def test_a_critic_that_changes_between_its_passes_is_refused_before_any_step() -> None:
    """T06's kind: no ratio tells of a separate critic, so its mode is compared."""
    spec = parse_spec({**made_spec().model_dump(), "policy": {"model": "unused", "value_head": "separate"}})
    critic = CriticModel(tiny_model("llama", seed=11).base_model).eval()
    engine = LocalEngine(PolicyModel(tiny_model("llama"), "separate").eval(), spec, critic)
    batch = made_batch(engine, spec)
    critic.train()
    with pytest.raises(RatioError, match="between the two passes changed: training mode False -> True"):
        run_updates(engine, batch, spec, iteration=1)
    assert engine.num_steps == 0


def _dropout(engine: LocalEngine) -> None:
    policy = engine.policy
    policy.model.config.attention_dropout = 0.1
    for module in policy.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    policy.train()


def _other_kernel(engine: LocalEngine) -> None:
    engine.policy.model.set_attn_implementation("eager")


def _shifted_positions(engine: LocalEngine) -> None:
    trunk = engine.policy.model.base_model
    forward = trunk.forward

    def shifted(*args: Any, position_ids: Tensor, **kwargs: Any) -> Any:
        return forward(*args, position_ids=position_ids + torch.arange(position_ids.shape[1]) // 3, **kwargs)

    trunk.forward = shifted


@pytest.mark.parametrize("fault", [_dropout, _other_kernel, _shifted_positions])
def test_a_pass_that_differs_from_the_old_one_is_refused_before_any_step(fault: Callable[[LocalEngine], None]) -> None:
    spec = made_spec()
    engine = made_engine(spec)
    batch = made_batch(engine, spec)
    before = weights(engine)
    fault(engine)
    with pytest.raises(
        RatioError, match=r"iteration 3: before any update max \|ratio - 1\| is [\d.e-]+, expected at most"
    ):
        run_updates(engine, batch, spec, iteration=3)
    assert engine.num_steps == 0
    assert torch.equal(weights(engine), before)


def test_in_critic_warm_up_only_the_value_head_learns() -> None:
    spec = made_spec(critic_warmup_iterations=2)
    engine = made_engine(spec)
    trunk = [parameter.detach().clone() for parameter in engine.policy.model.parameters()]
    head = engine.policy.value_head.weight.detach().clone()
    run_updates(engine, made_batch(engine, spec), spec, iteration=2)
    assert all(torch.equal(a, b) for a, b in zip(trunk, engine.policy.model.parameters(), strict=True))
    assert not torch.equal(head, engine.policy.value_head.weight)
    run_updates(engine, made_batch(engine, spec), spec, iteration=3)
    assert any(not torch.equal(a, b) for a, b in zip(trunk, engine.policy.model.parameters(), strict=True))


def test_state_goes_out_and_comes_back_bit_for_bit() -> None:
    spec = made_spec()
    first = made_engine(spec)
    batch = made_batch(first, spec)
    run_updates(first, batch, spec, iteration=1)
    state = {name: tensor.clone() for name, tensor in whole_state(first).items()}
    second = made_engine(spec)
    second.load_state(state, first.num_steps)
    for engine in (first, second):
        run_updates(engine, made_batch(engine, spec), spec, iteration=2)
    assert torch.equal(weights(first), weights(second))
