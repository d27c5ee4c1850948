"""The KL coefficient: steps by hand, where a closed loop comes to rest, bounds, and what a restart takes over."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ppo_core.kl_controller import KLUpdate, adapted_coef, coef_to_start_from, update_kl_coef
from ppo_core.spec import RunSpec, parse_spec
from ppo_core.spec.groups import KLConfig


def spec_with(**groups: Any) -> RunSpec:
    return parse_spec(
        {
            "name": "t",
            "policy": {"model": "/x"},
            "data": {"prompts": "/p"},
            "reward": {"sources": [{"kind": "python", "name": "r"}]},
            "rollout": {"batch_size": 2},
            "update": {"minibatches": 1, **groups.pop("update", {})},
            **groups,
        }
    )


ADAPTIVE = {"controller": "adaptive", "coef": 0.1, "target": 2.0, "horizon": 20}


@pytest.mark.parametrize(
    ("coef", "error", "num_responses", "horizon", "expected"),
    [
        (0.1, 0.1, 64, 640, 0.101),  # within the clip: 1 + .1 · .1
        (0.1, 1.0, 64, 640, 0.102),  # clipped to .2
        (0.1, -1.0, 64, 640, 0.098),
        (0.1, 0.0, 64, 640, 0.1),
        (0.1, 5.0, 64, 64, 0.12),  # the largest step there is
        (0.1, -5.0, 64, 64, 0.08),
    ],
)
def test_a_step_by_hand(coef: float, error: float, num_responses: int, horizon: int, expected: float) -> None:
    assert adapted_coef(coef, error, num_responses, horizon) == pytest.approx(expected, rel=1e-12)


def test_the_pace_does_not_depend_on_the_batch_size() -> None:
    once = adapted_coef(0.1, 0.2, 64, 100_000)
    fourfold = 0.1
    for _ in range(4):
        fourfold = adapted_coef(fourfold, 0.2, 16, 100_000)
    assert fourfold == pytest.approx(once, rel=1e-7)


@pytest.mark.parametrize("error", [math.nan, math.inf, -math.inf])
def test_an_error_that_is_not_finite_moves_nothing(error: float) -> None:
    assert adapted_coef(0.1, error, 64, 64) == 0.1


def test_the_coefficient_stays_within_its_bounds_for_ever() -> None:
    low = high = 0.1
    for _ in range(500):
        low, high = adapted_coef(low, -1.0, 1, 1), adapted_coef(high, 1.0, 1, 1)
    assert (low, high) == (1e-6, 100.0)
    assert adapted_coef(low, 1.0, 1, 1) == pytest.approx(1.2e-6)


def test_a_loop_whose_kl_falls_with_the_coefficient_comes_to_its_target() -> None:
    """KL = 1 / coef: at the target 4 the coefficient is 1/4, from above and from below."""
    for coef in (0.05, 1.0):
        for _ in range(400):
            coef = adapted_coef(coef, (1 / coef - 4) / 4, 64, 640)
        assert 1 / coef == pytest.approx(4.0, rel=1e-3)


def moved(iteration: int = 1, **groups: Any) -> KLUpdate:
    """Two responses, of KL 1.5 and 3.5 a response: 2.5 on average. Rubbish behind the mask."""
    old = torch.tensor([[-1.0, -1.0, math.nan], [-1.0, -0.5, -1.0]])
    ref = torch.tensor([[-2.0, -1.5, 7.0], [-2.0, -2.0, -2.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    return update_kl_coef(0.1, old, ref, mask, iteration, spec_with(**groups))


def test_the_kl_is_that_of_a_response_and_not_of_a_token() -> None:
    move = moved(kl=ADAPTIVE)
    assert move.error == pytest.approx((2.5 - 2.0) / 2.0)
    assert move.coef == pytest.approx(0.1 * (1 + 0.2 * 2 / 20))


def test_the_kl_is_k1_whatever_the_penalty_is() -> None:
    assert moved(kl={**ADAPTIVE, "estimator": "k3"}) == moved(kl=ADAPTIVE)


def test_a_fixed_coefficient_stays() -> None:
    assert moved(kl={"coef": 0.1}) == KLUpdate(None, 0.1)


def test_while_the_critic_warms_up_the_coefficient_waits() -> None:
    waiting = moved(2, kl=ADAPTIVE, update={"critic_warmup_iterations": 2})
    assert waiting == KLUpdate(pytest.approx(0.25), 0.1)
    assert moved(3, kl=ADAPTIVE, update={"critic_warmup_iterations": 2}) == moved(3, kl=ADAPTIVE)


@pytest.mark.parametrize(
    ("then", "now", "expected"),
    [
        ({"coef": 0.1}, ADAPTIVE, 0.07),  # goes on
        ({"coef": 0.05}, ADAPTIVE, 0.1),  # somebody changed it: the new one wins
        ({"coef": 0.1}, {"coef": 0.1}, 0.1),  # fixed again
        ({"coef": 0.1}, {**ADAPTIVE, "target": 9.0}, 0.07),  # another target moves what there is
    ],
)
def test_what_a_restart_takes_over(then: dict[str, Any], now: dict[str, Any], expected: float) -> None:
    assert coef_to_start_from(0.07, {"kl": then}, KLConfig.model_validate(now)) == expected
