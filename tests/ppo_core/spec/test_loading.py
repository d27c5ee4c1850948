"""Text to spec: every malformed variant is refused whole, with pointer and remedy, and nothing else passes by."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from ppo_core.errors import SpecError
from ppo_core.spec import (
    RunSpec,
    SpecFaults,
    apply_overrides,
    map_paths,
    parse_spec,
    read_mapping,
    resolve_paths,
    spec_paths,
)
from ppo_core.spec.fields import every_field, group_in, holds_list, holds_names, names_path, path_places
from ppo_core.spec.loading import MAX_DEPTH, MAX_SPEC_BYTES
from ppo_core.spec.setting import PathText, setting
from tests.ppo_core.spec.places import BASE, Place, with_value

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


def test_spec_faults_are_spec_errors_and_value_errors() -> None:
    with pytest.raises(SpecError):
        parse_spec("")
    with pytest.raises(ValueError, match="mapping"):
        parse_spec("")


def test_deep_nesting_is_refused_not_a_crash() -> None:
    nest: Any = 1
    for _ in range(500):
        nest = {"a": [nest]}
    for call in (parse_spec, lambda data: map_paths(data, str), lambda data: apply_overrides(data, ["kl.coef=1"])):
        with pytest.raises(SpecFaults, match=f"deeper than {MAX_DEPTH}"):
            call({**BASE, "kl": nest})


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
