"""Text to spec: every malformed variant is refused whole, with pointer and remedy, and nothing else passes by."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from ppo_core.errors import SpecError
from ppo_core.spec import (
    Fault,
    RunSpec,
    SpecFaults,
    apply_overrides,
    map_paths,
    parse_spec,
    read_mapping,
    resolve_paths,
    spec_paths,
    spec_schema,
)
from ppo_core.spec.fields import every_field, group_in, holds_list, holds_names, names_path, path_places
from ppo_core.spec.loading import MAX_DEPTH, MAX_SPEC_BYTES
from ppo_core.spec.setting import Changeable, PathText, setting

ROOT = Path(__file__).resolve().parents[3]

BASE: dict[str, Any] = {
    "name": "t",
    "policy": {"model": "/x"},
    "data": {"prompts": "/p", "held_out": "/h"},
    "reward": {"sources": [{"kind": "python", "name": "r"}]},
    "gate": {"judge": {"kind": "python", "name": "j"}},
}
ADAPTIVE = {"controller": "adaptive", "target": 6, "horizon": 10_000}
Place = tuple[str | int, ...]


def with_value(place: Place, value: Any) -> dict[str, Any]:
    data = copy.deepcopy(BASE)
    node: Any = data
    for key in place[:-1]:
        node = node[key] if isinstance(node, list) else node.setdefault(key, {})
    node[place[-1]] = value
    return data


def faults_of(source: Any) -> list[Fault]:
    with pytest.raises(SpecFaults) as caught:
        parse_spec(source)
    return list(caught.value.faults)


def leaves(model: type[BaseModel] = RunSpec, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """(place, annotation) of every field, those of the first list entries included."""
    for name, field in model.model_fields.items():
        yield (*place, name), field.annotation
        for choice in (field.annotation, *get_args(field.annotation)):
            if isinstance(choice, type) and issubclass(choice, BaseModel):
                below = (*place, name, 0) if get_origin(field.annotation) is list else (*place, name)
                yield from leaves(choice, below)


FIELDS = dict(leaves())


def kinds_of(place: Place) -> set[Any]:
    annotation = FIELDS[place]
    choices = get_args(annotation) if annotation is not None and NoneType in get_args(annotation) else (annotation,)
    return {choice for choice in choices if choice is not NoneType}


def numbers(kind: type) -> list[Place]:
    return [place for place in FIELDS if kind in kinds_of(place)]


def pointer(place: Place) -> str:
    return "".join(f"/{part}" for part in place)


def named(place: Place) -> str:
    return pointer(place)


# YAML


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the spec is empty; a spec is a mapping of fields"),
        ("# only a comment", "the spec is empty"),
        ("just words", "the spec is 'just words'; a spec is a mapping of fields"),
        ("- a\n- b", "the spec is a list"),
        ("a: [", "line 1, column 5"),
        ("a: 1\n b: 2", "line 2"),
        ("a: b: c", "mapping values are not allowed here"),
        ("\ta: 1", "line 1, column 1"),
        ("a: 'open", "line 1"),
        ("a: 1\na: 2", "line 2, column 1: the key 'a' is given twice"),
        ("a: {b: 1, c: 2, b: 3}", "the key 'b' is given twice"),
        ("1: 2", "the key 1 is not text"),
        ("? [a]\n: 1", "is not text"),
        ("null: 1", "the key None is not text"),
        ("a: &x 1\nb: *x", "aliases"),
        ("a: !!python/object/apply:os.system [x]", "tags"),
        ("a: !!timestamp x", "tags"),
        ("a: !!set {x}", "tags"),
        ("a: !mine x", "tags"),
        ("a: 1\n---\nb: 2", "another document"),
        ("%YAML 3.0\n---\na: 1", "incompatible"),
        ("a: \x00", "unacceptable character"),
        ("a: \ud800", "unacceptable character"),
        ("a: " + "[" * 100_000, "nested deeper"),
        ("a: " + "[" * 5000 + "]" * 5000, "nested deeper"),
        ("a: " + "{b: " * 500 + "1" + "}" * 500, "nested deeper"),
        ("a: " + "9" * 5000, "not valid YAML"),
        ("a: " + "x" * MAX_SPEC_BYTES, "longer than"),
        ("a: " + "ä" * (MAX_SPEC_BYTES // 2), "longer than"),
    ],
    ids=range(29),
)
def test_text_that_is_no_spec_is_refused(text: str, message: str) -> None:
    with pytest.raises(SpecFaults, match=message) as caught:
        parse_spec(text)
    assert caught.value.exit_code == 64


def test_a_billion_laughs_are_refused_before_they_are_built() -> None:
    text = "a: &a [x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdef", "bcdefg", strict=True))
    with pytest.raises(SpecFaults, match="aliases"):
        read_mapping(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1.0e-5", 1e-5),
        ("-1E+2", -100.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("-3", -3),
        ("1_000", 1000),
        ("010", 10),
        ("true", True),
        ("null", None),
        ("~", None),
        ("yes", "yes"),
        ("on", "on"),
        ("True", "True"),
        ("2024-01-01", "2024-01-01"),
        ("2001-02-31", "2001-02-31"),
        ("12:30:00", "12:30:00"),
        ("0x10", "0x10"),
        ("'1'", "1"),
    ],
)
def test_plain_values_mean_what_they_look_like(text: str, value: Any) -> None:
    found = read_mapping(f"a: {text}")["a"]
    assert found == value
    assert type(found) is type(value)


def test_json_is_read_as_it_is() -> None:
    assert parse_spec(json.dumps(BASE)) == parse_spec(BASE)


@given(st.text(max_size=60))
def test_any_text_is_a_spec_or_faults_never_another_error(text: str) -> None:
    with pytest.raises(SpecFaults):
        parse_spec(text)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.text(max_size=9) | st.sampled_from(list(RunSpec.model_fields)), inner)
        ),
    )
)
def test_any_value_in_any_place_is_faults_never_another_error(value: Any) -> None:
    for place in (("policy",), ("reward", "sources"), ("gate", "judge"), ("update", "epochs"), ("kl", "coef")):
        with contextlib.suppress(SpecFaults):
            parse_spec(with_value(place, value))


# Fields


def test_the_base_of_these_tests_is_a_good_spec() -> None:
    assert parse_spec(BASE).iterations == 100


def test_all_faults_are_named_at_once() -> None:
    data = with_value(("seed",), "x")
    data["kl"] = {"coef": -1, "nonsense": 2}
    del data["policy"]
    assert {fault.pointer for fault in faults_of(data)} == {"/seed", "/kl/coef", "/kl/nonsense", "/policy"}


@pytest.mark.parametrize("place", FIELDS, ids=named)
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


@pytest.mark.parametrize("place", [*numbers(int), *numbers(float)], ids=named)
@pytest.mark.parametrize("value", ["1", "0.5", "", True, False, [1], {}, math.nan, math.inf, -math.inf])
def test_a_number_is_a_number(place: Place, value: Any) -> None:
    assert pointer(place) in {fault.pointer for fault in faults_of(with_value(place, value))}


@pytest.mark.parametrize("place", [*numbers(int), *numbers(float)], ids=named)
@pytest.mark.parametrize("value", [10**400, -(10**400), 1e300, -1e300])
def test_no_number_is_without_bounds(place: Place, value: Any) -> None:
    assert pointer(place) in {fault.pointer for fault in faults_of(with_value(place, value))}


@pytest.mark.parametrize("text", ["1e400", "-1e400", ".nan", ".inf", "-.inf"])
def test_non_finite_text_is_refused_as_a_number(text: str) -> None:
    data = json.dumps({**BASE, "kl": {"coef": 0}}).replace('"coef": 0', f'"coef": {text}')
    assert [fault.pointer for fault in faults_of(data)] == ["/kl/coef"]


@pytest.mark.parametrize("place", numbers(int), ids=named)
def test_a_whole_number_has_no_fraction(place: Place) -> None:
    assert pointer(place) in {fault.pointer for fault in faults_of(with_value(place, 1.5))}


@pytest.mark.parametrize("place", [p for p in FIELDS if any(get_origin(k) is Literal for k in kinds_of(p))], ids=named)
@pytest.mark.parametrize("value", ["nonsense", "", 1, None, ["x"]])
def test_a_choice_is_one_of_those_offered(place: Place, value: Any) -> None:
    assert pointer(place) in {fault.pointer for fault in faults_of(with_value(place, value))}


@pytest.mark.parametrize("place", numbers(str), ids=named)
@pytest.mark.parametrize("value", [1, True, "", "x" * 5000, "a\nb", "a\x00b", "a\n", "\ud800", b"x", ["x"], {}])
def test_text_is_short_clean_text(place: Place, value: Any) -> None:
    assert pointer(place) in {fault.pointer for fault in faults_of(with_value(place, value))}


@pytest.mark.parametrize(
    "place",
    [p for p in FIELDS if any(isinstance(k, type) and issubclass(k, BaseModel) for k in kinds_of(p))],
    ids=named,
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


def test_an_adaptive_controller_with_target_and_horizon_is_a_good_spec() -> None:
    spec = parse_spec({**BASE, "kl": ADAPTIVE})
    assert (spec.kl.target, spec.kl.horizon) == (6.0, 10_000)


def test_an_adaptive_controller_without_either_is_told_both() -> None:
    found = faults_of({**BASE, "kl": {"controller": "adaptive"}})
    assert [fault.pointer for fault in found] == ["/kl/target", "/kl/horizon"]


def test_a_long_value_is_shortened_in_the_message() -> None:
    assert len(faults_of(with_value(("seed",), "x" * 100_000))[0].message) < 300


def test_deep_nesting_is_refused_not_a_crash() -> None:
    nest: Any = 1
    for _ in range(500):
        nest = {"a": [nest]}
    for call in (parse_spec, lambda data: map_paths(data, str), lambda data: apply_overrides(data, ["kl.coef=1"])):
        with pytest.raises(SpecFaults, match=f"deeper than {MAX_DEPTH}"):
            call({**BASE, "kl": nest})


def test_a_checked_spec_never_changes() -> None:
    spec = parse_spec(BASE)
    with pytest.raises(ValueError, match="frozen"):
        spec.kl.coef = 1.0  # type: ignore[misc]


def test_a_resolved_spec_reads_back_the_same() -> None:
    spec = parse_spec(BASE)
    assert parse_spec(spec.model_dump(mode="json")) == spec
    assert parse_spec(json.dumps(spec.model_dump(mode="json"))) == spec


# Overrides


@pytest.mark.parametrize(
    ("override", "place", "value"),
    [
        ("kl.coef=0.1", ("kl", "coef"), 0.1),
        ("update.learning_rate=1e-4", ("update", "learning_rate"), 1e-4),
        ("update.value_clip_range=", ("update", "value_clip_range"), None),
        ("update.value_clip_range=null", ("update", "value_clip_range"), None),
        ("reward.sources.0.weight=2.0", ("reward", "sources", 0, "weight"), 2.0),
        ("name=a=b", ("name",), "a=b"),
        ("rollout.stop_strings=['x', y]", ("rollout", "stop_strings"), ["x", "y"]),
        (" seed =7", ("seed",), 7),
    ],
)
def test_an_override_sets_one_field(override: str, place: Place, value: Any) -> None:
    node: Any = apply_overrides(BASE, [override])
    for key in place:
        node = node[key]
    assert node == value


def test_an_override_leaves_its_source_alone() -> None:
    before = copy.deepcopy(BASE)
    apply_overrides(BASE, ["reward.sources.0.weight=2.0", "kl.coef=3"])
    assert before == BASE


def test_an_override_fills_a_group_that_was_null() -> None:
    data = apply_overrides({**BASE, "gate": {"judge": None}}, ["gate.judge.kind=python", "gate.judge.name=v"])
    assert parse_spec(data).gate.judge is not None


@pytest.mark.parametrize(
    ("override", "where", "message"),
    [
        ("x", "", "field.name=value"),
        ("=1", "", "field.name=value"),
        ("a.=1", "", "field.name=value"),
        ("a..b=1", "", "field.name=value"),
        ("name.x=1", "/name/x", "'name' is no group"),
        ("reward.sources.5.weight=1", "/reward/sources/5", "no entry '5'"),
        ("reward.sources.1=1", "/reward/sources/1", "no entry '1'"),
        ("reward.sources.-1.weight=1", "/reward/sources/-1", "no entry '-1'"),
        ("reward.sources.a=1", "/reward/sources/a", "no entry 'a'"),
        ("kl.coef=[", "/kl/coef", "not valid YAML"),
        ("kl.coef=a: b: c", "/kl/coef", "not valid YAML"),
        ("kl.coef=*x", "/kl/coef", "aliases"),
        ("kl.coef=!!python/name:os.system", "/kl/coef", "tags"),
        ("kl.coef=" + "[" * 3000 + "]" * 3000, "/kl/coef", "nested deeper"),
    ],
)
def test_a_bad_override_is_a_fault_of_its_field(override: str, where: str, message: str) -> None:
    with pytest.raises(SpecFaults, match=message) as caught:
        apply_overrides(BASE, [override])
    (fault,) = caught.value.faults
    assert fault.pointer == where
    assert len(fault.message) < 400


# Paths


def test_every_path_field_is_listed_and_mapped() -> None:
    data = with_value(("reward", "sources", 0), {"kind": "sequence_classifier", "model": "/rm"})
    data["gate"] = {"judge": {"kind": "sequence_classifier", "model": "/jm"}}
    moved = parse_spec(map_paths(data, lambda text: "/moved" + text))
    assert dict(spec_paths(moved)) == {
        "/policy/model": "/moved/x",
        "/data/prompts": "/moved/p",
        "/data/held_out": "/moved/h",
        "/reward/sources/0/model": "/moved/rm",
        "/gate/judge/model": "/moved/jm",
    }


def filled(model: type[BaseModel]) -> dict[str, Any]:
    """Raw data with every group of the schema in it, and its own dotted name in each field that names a path."""
    data: dict[str, Any] = {}
    for name, field in every_field(model):
        keys = name.replace("[]", "").split(".")
        holder = data
        for key in keys[:-1]:
            holder = holder[key][0] if isinstance(holder[key], list) else holder[key]
        if names_path(field):
            holder[keys[-1]] = name
        elif group_in(field.annotation) is not None:
            holder[keys[-1]] = [{}] if holds_list(field) else {"*": {}} if holds_names(field) else {}
    return data


def test_what_the_schema_marks_as_a_path_is_mapped_whichever_group_it_is_in() -> None:
    seen: list[str] = []
    map_paths(filled(RunSpec), lambda text: seen.append(text) or text)  # type: ignore[func-returns-value]
    assert sorted(seen) == sorted(name for name, field in every_field(RunSpec) if names_path(field))
    assert {"policy.model", "data.held_out", "reward.sources[].model", "gate.judge.model"} <= set(seen)


class Inner(BaseModel):
    file: str | None = setting(None, "fork", "A file.", path=True)
    text: str = setting("", "fork", "No file.")


class Outer(BaseModel):
    one: Inner | None = setting(None, "fork", "Perhaps one.")
    several: list[Inner] | None = setting(None, "fork", "Perhaps several.")


def test_paths_are_found_in_groups_that_may_be_null_and_in_lists_that_may_be() -> None:
    data = {"one": {"file": "a", "text": "x"}, "several": [{"file": "b"}, {"file": None}, 3, {"file": "c"}]}
    found = [(pointer, holder[key]) for pointer, holder, key in path_places(data, Outer)]
    assert found == [("/one/file", "a"), ("/several/0/file", "b"), ("/several/3/file", "c")]


def test_a_path_is_one_text_and_a_field_holds_one_kind_of_group() -> None:
    """What the walk over paths relies on: it would pass over a list of paths, and over the second of two groups."""
    for name, field in every_field(RunSpec):
        if names_path(field):
            assert set(get_args(field.annotation)) <= {PathText, str, NoneType}, name
        annotation = str(field.annotation)
        assert annotation.count("Config") + annotation.count("RewardSource") <= 1, name


@pytest.mark.parametrize(
    "data", [{}, {"policy": 1}, {"reward": {"sources": {"model": 1}}}, {"reward": {"sources": [1]}}]
)
def test_malformed_data_passes_through_path_mapping(data: dict[str, Any]) -> None:
    assert map_paths(data, str.upper) == data


def test_relative_paths_that_exist_become_absolute(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").touch()
    data = resolve_paths({"data": {"prompts": "train.jsonl", "held_out": "none.jsonl"}}, tmp_path)
    assert data["data"] == {"prompts": str(tmp_path.resolve() / "train.jsonl"), "held_out": "none.jsonl"}


@pytest.mark.parametrize("text", ["a\x00b", "x" * 5000, "~nobody-of-this-name/x", "\ud800", "", "loop"])
def test_text_that_is_no_path_stays_as_it_is(text: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    expected = text if text else str(tmp_path.resolve())
    assert resolve_paths({"policy": {"model": text}}, tmp_path) == {"policy": {"model": expected}}


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


def test_spec_faults_are_spec_errors_and_value_errors() -> None:
    with pytest.raises(SpecError):
        parse_spec("")
    with pytest.raises(ValueError, match="mapping"):
        parse_spec("")


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


def test_a_judge_that_is_the_reward_under_another_spelling_is_refused() -> None:
    data = {
        **BASE,
        "data": {**BASE["data"], "held_out": "held_out.jsonl"},
        "reward": {"sources": [{"kind": "http", "url": "https://rm.example/score"}]},
        "gate": {"judge": {"kind": "http", "url": "https://RM.example:443/score", "retries": 1}},
    }
    with pytest.raises(SpecFaults, match="cannot see that one being hacked"):
        parse_spec(data)
