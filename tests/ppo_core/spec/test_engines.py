"""What engines cannot do is refused at submit, by field and with the remedy."""

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


@pytest.mark.parametrize(
    ("servers", "pointer", "message"),
    [
        (["http://vllm:8000", "http://VLLM:8000/"], "/rollout/vllm/servers", "stands here twice"),
        (["vllm:8000"], "/rollout/vllm/servers", "expected an address such as"),
        (["http://me:secret@vllm:8000"], "/rollout/vllm/servers", "user name or password"),
        ([""], "/rollout/vllm/servers/0", "at least 1 character"),
    ],
)
def test_servers_are_plain_addresses_each_given_once(servers: list[str], pointer: str, message: str) -> None:
    (fault,) = faults(vllm={"servers": servers})
    assert fault.pointer == pointer
    assert message in fault.message


def test_what_a_servers_operator_decides_is_not_for_the_spec() -> None:
    found = faults(vllm={"servers": ["http://vllm:8000"], "replicas": 2, "kv_cache_gib": 2.0})
    assert {fault.pointer for fault in found} == {"/rollout/vllm/replicas", "/rollout/vllm/kv_cache_gib"}
    assert "is for processes that the run starts itself" in found[0].message


def test_a_model_over_several_gpus_needs_them() -> None:
    (fault,) = faults(vllm={"tensor_parallel": 2})
    assert fault.pointer == "/rollout/vllm/tensor_parallel"
    assert "resources.gpus" in fault.message


@pytest.mark.parametrize(
    ("changes", "pointer"),
    [
        ({"training": {"ranks": 9}}, "/training/ranks"),
        ({"policy": {"dtype": "bfloat16"}, "training": {"zero_stage": 0}}, "/training/zero_stage"),
        ({"policy": {"dtype": "bfloat16"}, "update": {"minibatches": 5}}, "/update/minibatches"),
    ],
)
def test_ranks_need_rows_and_a_stage_that_adds_up_in_float32(changes: dict[str, Any], pointer: str) -> None:
    """Two ranks with eight rows; in bfloat16 a step takes a row of each."""
    raw = copy.deepcopy(BASE) | {
        "rollout": {"batch_size": 8},
        "update": {"minibatches": 4, **changes.get("update", {})},
        "training": {"engine": "deepspeed", "ranks": 2, "zero_stage": 1, **changes.get("training", {})},
    }
    raw["policy"] = {**raw["policy"], **changes.get("policy", {})}
    with pytest.raises(SpecFaults) as error:
        parse_spec(raw)
    assert [fault.pointer for fault in error.value.faults] == [pointer]
