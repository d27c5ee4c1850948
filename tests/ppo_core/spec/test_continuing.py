"""Which specs can go on from a checkpoint of which other."""

from __future__ import annotations

from typing import Any

import pytest

from ppo_core.spec import misfits_with_checkpoint, parse_spec


def spec_with(**policy: Any) -> Any:
    return parse_spec(
        {
            "name": "n",
            "policy": {"model": "/m", **policy},
            "data": {"prompts": "/p.jsonl"},
            "reward": {"sources": [{"kind": "python", "name": "length"}]},
        }
    )


@pytest.mark.parametrize(
    ("now", "then", "words"),
    [
        ({}, {"lora": {"rank": 4}}, "policy.lora is null, but the checkpoint was written under rank 4, alpha 32; set"),
        ({"lora": {"rank": 8}}, {"lora": {"rank": 4}}, "policy.lora is rank 8, alpha 32, but"),
        ({"lora": {"alpha": 8}}, {"lora": {}}, "policy.lora is rank 16, alpha 8, but"),
        ({"value_head": "separate"}, {}, "policy.value_head is separate, but the checkpoint was written under shared;"),
        ({"dtype": "bfloat16"}, {}, "policy.dtype is bfloat16, but the checkpoint was written under float32; set"),
    ],
)
def test_other_trained_parameters_are_named_with_both_values_and_the_remedy(
    now: dict[str, Any], then: dict[str, Any], words: str
) -> None:
    (found,) = misfits_with_checkpoint(spec_with(**now), spec_with(**then).model_dump(mode="json")).items()
    pointer, message = found
    assert message.startswith(words)
    assert message.endswith("or start a new run from a policy folder")
    assert pointer.removeprefix("/policy/") in message


@pytest.mark.parametrize(
    ("now", "then"), [({}, {}), ({"value_head": "shared_detached"}, {}), ({"gradient_checkpointing": True}, {})]
)
def test_what_trains_the_same_parameters_goes_on(now: dict[str, Any], then: dict[str, Any]) -> None:
    assert misfits_with_checkpoint(spec_with(**now), spec_with(**then).model_dump(mode="json")) == {}
