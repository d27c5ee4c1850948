"""What the vLLM engine cannot do is refused at submit, by field and with the remedy."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from ppo_core.spec import Fault, SpecFaults, parse_spec
from tests.ppo_core.spec.test_loading import BASE


def faults(**rollout: Any) -> tuple[Fault, ...]:
    raw = copy.deepcopy(BASE)
    raw["rollout"] = {**raw.get("rollout", {}), "engine": "vllm", **rollout}
    with pytest.raises(SpecFaults) as error:
        parse_spec(raw)
    return error.value.faults


@pytest.mark.parametrize(("name", "value"), [("top_p", 0.9), ("top_k", 20), ("min_new_tokens", 2)])
def test_limits_of_sampling_are_not_vllms(name: str, value: float) -> None:
    (fault,) = faults(**{name: value, "renormalize": True})
    assert fault.pointer == f"/rollout/{name}"
    assert "vLLM does not say which tokens could be; leave the field out, or set rollout.engine" in fault.message


@pytest.mark.parametrize("temperature", [0.001, 2.5])
def test_temperatures_that_vllm_would_change_are_refused(temperature: float) -> None:
    (fault,) = faults(temperature=temperature)
    assert fault.pointer == "/rollout/temperature"
    assert f"temperature is {temperature:g} but vLLM samples at 0.01 to 2" in fault.message


def test_a_model_over_several_gpus_needs_them() -> None:
    (fault,) = faults(vllm={"tensor_parallel": 2})
    assert fault.pointer == "/rollout/vllm/tensor_parallel"
    assert "resources.gpus" in fault.message
