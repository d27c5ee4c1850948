"""Fields of a spec: what is out of place, out of bounds or at odds with another is named, and all of it at once."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from ppo_core.spec import (
    RunSpec,
    SpecFaults,
    parse_spec,
    spec_schema,
)
from ppo_core.spec.fields import every_field
from ppo_core.spec.setting import Changeable
from tests.ppo_core.spec.places import ADAPTIVE, BASE, FIELDS, Place, faults_of, kinds_of, numbers, pointer, with_value

ROOT = Path(__file__).resolve().parents[3]


def test_the_base_of_these_tests_is_a_good_spec() -> None:
    assert parse_spec(BASE).iterations == 100


def test_all_faults_are_named_at_once() -> None:
    data = with_value(("seed",), "x")
    data["kl"] = {"coef": -1, "nonsense": 2}
    del data["policy"]
    assert {fault.pointer for fault in faults_of(data)} == {"/seed", "/kl/coef", "/kl/nonsense", "/policy"}


@pytest.mark.parametrize("place", FIELDS, ids=pointer)
def test_one_wrong_letter_is_refused_with_the_right_name(place: Place) -> None:
    name = str(place[-1])
    wrong = name + name[-1]
    found = {fault.pointer: fault.message for fault in faults_of(with_value((*place[:-1], wrong), 1))}
    message = found[pointer((*place[:-1], wrong))]
    assert message.startswith("unknown field; did you mean `")
    assert f"`{name}`" in message


@pytest.mark.parametrize(
    ("place", "known"),
    [
        (("sede",), "seed"),
        (("updaet",), "update"),
        (("policy", "lora", "rnak"), "rank"),
        (("reward", "sources", 0, "wieght"), "weight"),
        (("gate", "judge", "nmae"), "name"),
        (("checkpoints", "keep_lst"), "keep_last"),
    ],
    ids=str,
)
def test_a_misspelt_field_is_refused_with_the_nearest_known_one(place: Place, known: str) -> None:
    found = {fault.pointer: fault.message for fault in faults_of(with_value(place, 1))}
    assert found[pointer(place)] == f"unknown field; did you mean `{known}`?"


@pytest.mark.parametrize("place", [*numbers(int), *numbers(float)], ids=pointer)
@pytest.mark.parametrize("value", ["1", "0.5", "", True, False, [1], {}, math.nan, math.inf, -math.inf])
def test_a_number_is_a_number(place: Place, value: Any) -> None:
    assert pointer(place) in {fault.pointer for fault in faults_of(with_value(place, value))}


@pytest.mark.parametrize("place", [*numbers(int), *numbers(float)], ids=pointer)
@pytest.mark.parametrize("value", [10**400, -(10**400), 1e300, -1e300])
def test_no_number_is_without_bounds(place: Place, value: Any) -> None:
    assert pointer(place) in {fault.pointer for fault in faults_of(with_value(place, value))}


@pytest.mark.parametrize("text", ["1e400", "-1e400", ".nan", ".inf", "-.inf"])
def test_non_finite_text_is_refused_as_a_number(text: str) -> None:
    data = json.dumps({**BASE, "kl": {"coef": 0}}).replace('"coef": 0', f'"coef": {text}')
    assert [fault.pointer for fault in faults_of(data)] == ["/kl/coef"]


@pytest.mark.parametrize("place", numbers(int), ids=pointer)
def test_a_whole_number_has_no_fraction(place: Place) -> None:
    assert pointer(place) in {fault.pointer for fault in faults_of(with_value(place, 1.5))}


@pytest.mark.parametrize(
    "place", [p for p in FIELDS if any(get_origin(k) is Literal for k in kinds_of(p))], ids=pointer
)
@pytest.mark.parametrize("value", ["nonsense", "", 1, None, ["x"]])
def test_a_choice_is_one_of_those_offered(place: Place, value: Any) -> None:
    assert pointer(place) in {fault.pointer for fault in faults_of(with_value(place, value))}


@pytest.mark.parametrize("place", numbers(str), ids=pointer)
@pytest.mark.parametrize("value", [1, True, "", "x" * 5000, "a\nb", "a\x00b", "a\n", "\ud800", b"x", ["x"], {}])
def test_text_is_short_clean_text(place: Place, value: Any) -> None:
    assert pointer(place) in {fault.pointer for fault in faults_of(with_value(place, value))}


@pytest.mark.parametrize(
    "place",
    [p for p in FIELDS if any(isinstance(k, type) and issubclass(k, BaseModel) for k in kinds_of(p))],
    ids=pointer,
)
@pytest.mark.parametrize("value", [1, "x", [], True])
def test_a_group_is_a_mapping(place: Place, value: Any) -> None:
    found = {fault.pointer: fault.message for fault in faults_of(with_value(place, value))}
    assert "expected a group of fields" in found[pointer(place)]


def test_a_field_in_the_wrong_group_is_told_where_it_belongs() -> None:
    assert faults_of(with_value(("learning_rate",), 1.0))[0].message.endswith("it belongs under `update`")
    assert faults_of(with_value(("rollout", "minibatches"), 1))[0].message.endswith("it belongs under `update`")


def test_pointers_are_escaped() -> None:
    assert faults_of(with_value(("a/b~c",), 1))[0].pointer == "/a~1b~0c"


def test_a_missing_field_is_named_with_its_description() -> None:
    data = copy.deepcopy(BASE)
    del data["policy"]["model"]
    (fault,) = faults_of(data)
    assert fault.pointer == "/policy/model"
    assert "folder in Hugging Face form" in fault.message


@pytest.mark.parametrize(
    ("place", "value", "where", "message"),
    [
        (("update", "minibatches"), 65, "/update/minibatches", "update.minibatches is 65"),
        (("data",), {"prompts": "/p"}, "/data/held_out", "the judge compares answers"),
        (("gate", "judge", "name"), "r", "/gate/judge", "one of reward.sources"),
        (("checkpoints", "keep_last"), 0, "/checkpoints/keep_last", "nothing to go back to"),
        (("kl",), {"controller": "adaptive", "horizon": 9999}, "/kl/target", "kl.target is null; set the KL"),
        (("kl",), {"controller": "adaptive", "target": 6}, "/kl/horizon", "kl.horizon is null; set the responses"),
        (("kl", "target"), 6.5, "/kl/target", "kl.target is 6.5 but kl.controller is fixed and takes none; set"),
        (("kl", "horizon"), 9000, "/kl/horizon", "kl.horizon is 9000 but kl.controller is fixed and takes none; set"),
        (("kl",), {**ADAPTIVE, "coef": 0}, "/kl/coef", "kl.coef is 0 but an adaptive coefficient is multiplied"),
        (("kl",), {**ADAPTIVE, "horizon": 63}, "/kl/horizon", "rollout.batch_size is 64: one iteration would move"),
        (
            ("reward", "length_baseline"),
            "linear",
            "/reward/length_baseline",
            "rollout.batch_size is 2: a slope needs at least 3 responses",
        ),
        (("reward", "sources", 0), {"kind": "python", "name": "r", "model": "/x"}, "/reward/sources/0/model", "is for"),
        (("reward", "sources", 0), {"kind": "sequence_classifier"}, "/reward/sources/0", "takes `model`"),
        (("reward", "sources", 0), {"kind": "http"}, "/reward/sources/0", "takes `url`"),
        (("gate", "judge"), {"kind": "sequence_classifier"}, "/gate/judge", "takes `model`"),
        (("gate", "judge"), {"kind": "python", "name": "j", "retries": 1}, "/gate/judge/retries", "is for kind http"),
        (
            ("reward", "sources", 0),
            {"kind": "sequence_classifier", "model": "/x", "template": "{response}", "chat_template": True},
            "/reward/sources/0/template",
            "exclude each other",
        ),
        (
            ("reward", "sources", 0),
            {"kind": "sequence_classifier", "model": "/x", "template": "{response.__class__}"},
            "/reward/sources/0/template",
            "is not known",
        ),
        (
            ("reward", "sources", 0),
            {"kind": "http", "url": "https://me:secret@rewards.example"},
            "/reward/sources/0/url",
            "user name or password",
        ),
    ],
)
def test_fields_that_do_not_fit_together_are_named(place: Place, value: Any, where: str, message: str) -> None:
    data = with_value(place, value)
    if "batch_size is 2" in message:
        data |= {"rollout": {"batch_size": 2}, "update": {"minibatches": 1}}
    (fault,) = faults_of(data)
    assert fault.pointer == where
    assert message in fault.message


def test_a_scorer_of_one_kind_with_anothers_name_is_told_both() -> None:
    found = {fault.pointer: fault.message for fault in faults_of(with_value(("gate", "judge", "kind"), "http"))}
    assert "takes `url`" in found["/gate/judge"]
    assert found["/gate/judge/name"] == "`name` is for kind python, and this is http; leave it out"


def test_a_judge_that_is_the_reward_under_another_spelling_is_refused() -> None:
    data = {
        **BASE,
        "data": {**BASE["data"], "held_out": "held_out.jsonl"},
        "reward": {"sources": [{"kind": "http", "url": "https://rm.example/score"}]},
        "gate": {"judge": {"kind": "http", "url": "https://RM.example:443/score", "retries": 1}},
    }
    with pytest.raises(SpecFaults, match="cannot see that one being hacked"):
        parse_spec(data)


def test_a_judge_that_is_a_reward_read_otherwise_is_the_same_scorer() -> None:
    model = {"kind": "sequence_classifier", "model": "/x"}
    data = with_value(("reward", "sources"), [model])
    data["gate"] = {"judge": {**model, "template": "{response}"}}
    assert [fault.pointer for fault in faults_of(data)] == ["/gate/judge"]
    service = {"kind": "http", "url": "https://rewards.example/score"}
    data = with_value(("reward", "sources"), [service])
    data["gate"] = {"judge": {**service, "batch_size": 1}}
    assert [fault.pointer for fault in faults_of(data)] == ["/gate/judge"]


def test_misfits_of_several_groups_are_named_at_once() -> None:
    data = with_value(("gate", "judge", "name"), "r")
    data["data"] = {"prompts": "/p"}
    data["update"] = {"minibatches": 100}
    assert [fault.pointer for fault in faults_of(data)] == ["/update/minibatches", "/data/held_out", "/gate/judge"]


@pytest.mark.parametrize(("name", "value"), [("top_p", 0.9), ("top_k", 50), ("min_new_tokens", 3)])
def test_limits_of_sampling_need_renormalised_logprobs(name: str, value: float) -> None:
    """T08: huggingface/trl#235."""
    raw = with_value(("rollout", name), value)
    (fault,) = faults_of(raw)
    assert fault.pointer == f"/rollout/{name}"
    assert "set rollout.renormalize to true" in fault.message
    raw["rollout"]["renormalize"] = True
    assert parse_spec(raw).rollout.limits_sampling


def test_a_shortest_response_as_long_as_the_longest_is_refused() -> None:
    raw = with_value(("rollout", "min_new_tokens"), 40)
    raw["rollout"]["renormalize"] = True
    (fault,) = faults_of(raw)
    assert (fault.pointer, "every response would be cut off" in fault.message) == ("/rollout/min_new_tokens", True)


def test_an_adaptive_controller_with_target_and_horizon_is_a_good_spec() -> None:
    spec = parse_spec({**BASE, "kl": ADAPTIVE})
    assert (spec.kl.target, spec.kl.horizon) == (6.0, 10_000)


def test_an_adaptive_controller_without_either_is_told_both() -> None:
    found = faults_of({**BASE, "kl": {"controller": "adaptive"}})
    assert [fault.pointer for fault in found] == ["/kl/target", "/kl/horizon"]


def test_a_long_value_is_shortened_in_the_message() -> None:
    assert len(faults_of(with_value(("seed",), "x" * 100_000))[0].message) < 300


def test_a_checked_spec_never_changes() -> None:
    spec = parse_spec(BASE)
    with pytest.raises(ValueError, match="frozen"):
        spec.kl.coef = 1.0  # type: ignore[misc]


def test_a_resolved_spec_reads_back_the_same() -> None:
    spec = parse_spec(BASE)
    assert parse_spec(spec.model_dump(mode="json")) == spec
    assert parse_spec(json.dumps(spec.model_dump(mode="json"))) == spec


# Schema


def test_every_field_has_a_description_of_its_own_and_a_rule_for_change() -> None:
    """A judge's fields are those of a reward source, by one base: the same name with the same words counts once."""
    descriptions = set()
    for schema in (spec_schema(), *spec_schema()["$defs"].values()):
        assert schema["additionalProperties"] is False
        for name, field in schema.get("properties", {}).items():
            descriptions.add((name, field["description"]))
            assert field["description"].endswith("."), name
            assert field["changeable"] in get_args(Changeable), name
    assert [text for text, count in Counter(text for _, text in descriptions).items() if count > 1] == []


def unbounded(schema: Any, place: str = "") -> Iterator[str]:
    """Where a JSON schema lets a number, a text or a list be as large as it likes."""
    needed = {
        "integer": ("imum", "imum"),
        "number": ("imum", "imum"),
        "string": ("Length",) * 2,
        "array": ("Items",) * 2,
    }
    if isinstance(schema, list):
        for index, part in enumerate(schema):
            yield from unbounded(part, f"{place}/{index}")
    if isinstance(schema, dict):
        kind = schema.get("type")
        fixed = "enum" in schema or "const" in schema
        if isinstance(kind, str) and kind in needed and not fixed:
            ends = needed[kind]
            upper = {f"max{ends[1]}", f"exclusiveMax{ends[1]}"}
            lower = {f"min{ends[0]}", f"exclusiveMin{ends[0]}"} if kind in ("integer", "number") else set(schema)
            if not upper & set(schema) or not lower & set(schema):
                yield place
        for key, part in schema.items():
            if key not in ("default", "enum"):
                yield from unbounded(part, f"{place}/{key}")


def test_every_number_text_and_list_has_bounds() -> None:
    assert list(unbounded(spec_schema())) == []


DOCS = sorted(path for path in (ROOT / "docs").rglob("*.md") if path.name != "spec.md")


@pytest.mark.parametrize("path", [ROOT / "README.md", *DOCS], ids=lambda path: path.name)
def test_no_other_page_repeats_a_description(path: Path) -> None:
    """docs/spec.md, the form and the API's page are made from the descriptions; a copy by hand would grow old."""
    text = " ".join(path.read_text(encoding="utf-8").split())
    long = [field.description or "" for _, field in every_field(RunSpec) if len(field.description or "") > 30]
    assert [description for description in long if description in text] == []
