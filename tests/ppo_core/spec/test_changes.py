"""Differences of specs, the rule of each field, and what repeats."""

from __future__ import annotations

from typing import Any

import pytest

from ppo_core.spec import (
    Difference,
    RunSpec,
    SpecFaults,
    apply_settings,
    changeable,
    differences,
    parse_spec,
    pointer_of,
    read_settings,
    refusals,
    repeats,
)
from ppo_core.spec.fields import every_field

SPEC: dict[str, Any] = parse_spec(
    {
        "name": "a",
        "policy": {"model": "p"},
        "data": {"prompts": "t.jsonl"},
        "reward": {"sources": [{"kind": "sequence_classifier", "model": "r"}]},
    }
).model_dump(mode="json")


def test_every_field_of_a_spec_has_its_rule() -> None:
    for name, field in every_field(RunSpec):
        extra = field.json_schema_extra
        assert isinstance(extra, dict), name
        word = changeable(name.replace("[]", ".0"))
        # A field of several kinds of scorer is as strict as the strictest of them.
        assert word == extra["changeable"] or name.startswith(("reward.sources", "gate.judge")), name


@pytest.mark.parametrize(
    ("path", "rule"),
    [
        ("name", "never"),
        ("seed", "fork"),
        ("data", "fork"),
        ("data.seed", "rollback"),
        ("data.prompts", "fork"),
        ("rollout.batch_size", "fork"),
        ("kl.coef", "rollback"),
        ("reward.sources.0.weight", "rollback"),
        ("no.such.field", "never"),
    ],
)
def test_a_field_may_change_when_its_own_word_says_so(path: str, rule: str) -> None:
    assert changeable(path) == rule


def test_differences_are_named_to_the_leaf_and_lists_of_one_length_by_place() -> None:
    after = apply_settings(SPEC, {"kl.coef": 0.1, "reward.sources.0.weight": 2.0, "policy.lora": {"rank": 4}})
    found = differences(SPEC, after)
    assert Difference("kl.coef", 0.05, 0.1) in found
    assert Difference("reward.sources.0.weight", 1.0, 2.0) in found
    assert Difference("policy.lora", None, {"rank": 4}) in found
    assert len(found) == 3
    longer = apply_settings(SPEC, {"reward.sources": [*SPEC["reward"]["sources"], {"kind": "x"}]})
    assert [change.path for change in differences(SPEC, longer)] == ["reward.sources"]


def test_equal_numbers_are_no_difference_and_a_truth_value_is_no_number() -> None:
    assert differences({"a": 1, "b": True}, {"a": 1.0, "b": True}) == []
    assert differences({"b": True}, {"b": 1}) == [Difference("b", True, 1)]


def test_setting_leaves_the_spec_alone_and_names_every_wrong_name() -> None:
    before = parse_spec(SPEC)
    with pytest.raises(SpecFaults) as caught:
        apply_settings(SPEC, {"kl.coef.deep": 1, "reward.sources.9.weight": 1, "kl..coef": 1, "kl.coef": 0.3})
    assert [fault.pointer for fault in caught.value.faults] == [
        "/set/kl.coef.deep", "/set/reward.sources.9.weight", "/set/kl..coef",
    ]  # fmt: skip
    assert parse_spec(SPEC) == before


def test_refusals_name_the_setting_and_the_remedy() -> None:
    wanted = {"rollout": {**SPEC["rollout"], "batch_size": 8, "top_k": 5}, "kl.coef": 0.1, "name": "b"}
    changes = differences(SPEC, apply_settings(SPEC, wanted))
    (batch, name) = refusals(changes, wanted, fork=False)
    assert {fault.pointer for fault in (batch, name)} == {"/set/rollout", "/set/name"}
    assert any(
        "rollout.batch_size cannot change within a run (it is 64): fork instead" in f.message for f in (batch, name)
    )
    assert [fault.pointer for fault in refusals(changes, wanted, fork=True)] == ["/set/name"]


def test_a_pointer_leads_to_the_setting_or_to_the_field() -> None:
    assert pointer_of("kl.coef", {"kl.coef": 1}) == "/set/kl.coef"
    assert pointer_of("kl.coef", {"kl": {}}) == "/set/kl"
    assert pointer_of("kl.coef", {"kl.co": 1}) == "/kl/coef"


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({}, True),
        ({"iterations": 500}, True),
        ({"iterations": 500, "update.lr_schedule": "cosine"}, False),
        ({"checkpoints.every": 1, "samples.every": 3, "resources.priority": 2}, True),
        ({"data.seed": 4}, False),
        ({"training.ranks": 2}, False),
        ({"resources.gpus": 1}, False),
    ],
)
def test_what_repeats(changes: dict[str, Any], same: bool) -> None:
    assert repeats(SPEC, apply_settings(SPEC, changes)) is same


def test_settings_of_a_command_line_are_read_as_yaml() -> None:
    texts = ["kl.coef=1e-1", "data.held_out=", "policy.lora={rank: 4}", "name=a=b"]
    assert read_settings(texts) == {"kl.coef": 0.1, "data.held_out": None, "policy.lora": {"rank": 4}, "name": "a=b"}
    with pytest.raises(SpecFaults, match="write it as"):
        read_settings(["kl.coef"])
