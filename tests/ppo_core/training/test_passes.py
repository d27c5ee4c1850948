"""The no-grad passes over a rollout: at the sampling temperature, for the policy and for its reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ppo_core.alignment import token_logprobs
from ppo_core.models.policy import PolicyModel
from ppo_core.rewards import kl_penalty
from ppo_core.spec import RunSpec, parse_spec
from ppo_core.training.local import LocalEngine
from ppo_core.training.passes import forward_logprobs, forward_policy
from tests.ppo_core.tiny_models import tiny_model
from tests.ppo_core.training.made_rollouts import made_rollout
from tests.ppo_core.training.test_updates import PROMPTS, RESPONSES, made_spec


def spec_at(temperature: float, **update: Any) -> RunSpec:
    data = made_spec(**update).model_dump()
    return parse_spec({**data, "rollout": {**data["rollout"], "temperature": temperature}})


@pytest.mark.parametrize("update", [{}, {"pack_rows": True}, {"token_budget": 1}])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_policy_and_reference_are_scored_at_the_sampling_temperature(
    temperature: float, update: dict[str, Any]
) -> None:
    """T07: OpenRLHF/OpenRLHF#853. Where both are the same model their KL is 0, to the last bit."""
    spec, rollout, model = spec_at(temperature, **update), made_rollout(PROMPTS, RESPONSES), tiny_model("llama")
    old = forward_policy(
        LocalEngine(PolicyModel(model, "shared", spec.update.row_layout).eval(), spec), rollout, spec, lambda: None
    )
    reference = PolicyModel(tiny_model("llama"), "separate", spec.update.row_layout).eval()
    ref_logprobs = forward_logprobs(reference, rollout, old.plan, spec, lambda: None)
    assert not kl_penalty(old.logprobs, ref_logprobs)[rollout.response_mask].any()
    with torch.no_grad():
        logits = model(input_ids=rollout.input_ids, attention_mask=rollout.attention_mask).logits
    mask = rollout.response_mask
    for at, is_it in ((temperature, True), (temperature * 1.1, False)):
        expected = token_logprobs(logits, rollout.input_ids, at)[mask]
        assert torch.allclose(old.logprobs[mask], expected, atol=1e-4) == is_it
