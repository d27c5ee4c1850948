"""From text to a checked `RunSpec`: YAML or JSON in, every fault at once out, each with its pointer and a remedy."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from ppo_core.errors import SpecError
from ppo_core.spec.fields import group_in, holds_names, path_places
from ppo_core.spec.run_spec import RunSpec
from ppo_core.spec.setting import Group, Misfits
from ppo_core.spec.watching import AlertsConfig

MAX_SPEC_BYTES = 256 * 1024
MAX_DEPTH = 32
_EXPECTED = "a spec is a mapping of fields: begin with `name: ...` (every field is in docs/spec.md)"
_TOO_DEEP = f"the spec is nested deeper than {MAX_DEPTH} levels; a spec has no more than five"


@dataclass(frozen=True)
class Fault:
    """One thing wrong with a spec. `pointer` is a JSON pointer (RFC 6901): `/update/learning_rate`."""

    pointer: str
    message: str

    def __str__(self) -> str:
        return f"{self.pointer or '/'}: {self.message}"


class SpecFaults(SpecError):
    """A spec with faults: all of them, in the order of the spec. `subject` says whose, where it is no spec."""

    def __init__(self, faults: Iterable[Fault], subject: str = "The spec has") -> None:
        self.faults = tuple(faults)
        self._subject = subject
        super().__init__("; ".join(str(fault) for fault in self.faults))

    @property
    def heading(self) -> str:
        """The line above the list of faults; the same wherever they are shown."""
        count = len(self.faults)
        return f"{self._subject} {count} fault{'' if count == 1 else 's'}."


class _AlertRules(Group):
    """The part of a spec that a platform's alert rules are."""

    alerts: AlertsConfig


class _StrictLoader(yaml.SafeLoader):
    """YAML without the traps: a key given twice is an error, 1e-4 is a number as it is in JSON, and only `true` and
    `false` are truth values. `yes`, `2024-01-01`, `12:30` and `010` are text, text, text and ten.
    """


def _mapping_without_duplicates(loader: _StrictLoader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is not text", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is given twice", key_node.start_mark)
        seen.add(key)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=deep)


def _number_like_json(loader: _StrictLoader, node: yaml.ScalarNode) -> int | float:
    text = str(node.value).replace("_", "")
    return float(text) if re.search(r"[.eE]", text) else int(text)


_TRAPS = ("timestamp", "bool", "int", "float", "merge", "value")
_StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag.rpartition(":")[2] not in _TRAPS]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_duplicates)
_StrictLoader.add_constructor("!json-number", _number_like_json)
_StrictLoader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^(?:true|false)$"), list("tf"))
_StrictLoader.add_implicit_resolver(  # YAML's own words for them, so that they are refused as numbers, not as text
    "tag:yaml.org,2002:float", re.compile(r"^(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"), list("-+.")
)
_StrictLoader.add_implicit_resolver(
    "!json-number",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)


def _load(text: str) -> Any:
    """The value that YAML text stands for.

    Raises:
        SpecFaults: not YAML (with line and column), or with aliases or tags.
    """
    try:
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:  # Looked at first: the time to read nested brackets grows with their square.
                raise SpecFaults([Fault("", _TOO_DEEP)])
            # Aliases can blow a short text up to gigabytes, tags name types; no spec needs either.
            if isinstance(event, yaml.AliasEvent):
                raise SpecFaults([Fault("", "YAML aliases (*name) are not allowed; write the value out")])
            if getattr(event, "tag", None) is not None:
                raise SpecFaults([Fault("", "YAML tags (!name) are not allowed; write the plain value")])
        return yaml.load(text, Loader=_StrictLoader)
    except SpecFaults:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise SpecFaults([Fault("", f"not valid YAML: {place}{error.problem or error.context}")]) from error
    except (yaml.YAMLError, ValueError) as error:
        raise SpecFaults([Fault("", f"not valid YAML: {error}")]) from error


def read_mapping(text: str) -> dict[str, Any]:
    """Parse YAML (of which JSON is a part) to a mapping.

    Raises:
        SpecFaults: too long, not YAML (with line and column), aliases, or not a mapping.
    """
    if len(text.encode("utf-8", "surrogatepass")) > MAX_SPEC_BYTES:
        raise SpecFaults([Fault("", f"the spec is longer than {MAX_SPEC_BYTES} bytes")])
    data = _load(text)
    if data is None:  # No text, or comments alone.
        raise SpecFaults([Fault("", f"the spec is empty; {_EXPECTED}")])
    if not isinstance(data, dict):
        raise SpecFaults([Fault("", f"the spec is {_kind(data)}; {_EXPECTED}")])
    return data


def parse_spec(source: str | Mapping[str, Any]) -> RunSpec:
    """Check a spec given as YAML text or as a mapping.

    Raises:
        SpecFaults: with every fault found, each with its pointer, the value and a remedy.
    """
    data = _deep_copy(read_mapping(source) if isinstance(source, str) else source)
    try:
        return RunSpec.model_validate(data)
    except ValidationError as error:
        raise SpecFaults(_faults(error)) from error


def parse_alert_rules(alerts: Mapping[str, Any]) -> dict[str, Any]:
    """Check a platform's own alert rules, a partial `alerts` group, by the classes that check a spec's.

    Returns:
        The fields that are set, and no defaults.

    Raises:
        SpecFaults: with every fault found; pointers begin with `/alerts`, as in a spec.
    """
    try:
        checked = _AlertRules.model_validate({"alerts": _deep_copy(alerts)})
    except ValidationError as error:
        raise SpecFaults(_faults(error), "The platform's alert rules have") from error
    return checked.alerts.model_dump(mode="json", exclude_unset=True)


def with_defaults(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A stored spec with the defaults of groups and fields that are newer than it.

    One that is no spec of this version is left as it is.
    """
    try:
        return parse_spec(stored).model_dump(mode="json")
    except SpecFaults:
        return dict(stored)


def apply_overrides(data: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy of `data` with `dotted.field=value` settings applied; values are read as YAML.

    Raises:
        SpecFaults: an override without `=`, or one that goes through a field that is no group.
    """
    result: dict[str, Any] = _deep_copy(data)
    for override in overrides:
        name, equals, text = override.partition("=")
        what = f"--set {_kind(override)}"
        if not equals:
            raise SpecFaults([Fault("", f"{what}: write it as field.name=value")])
        _place(result, name, override_value(name, text, what), what)
    return result


def place_value(data: Mapping[str, Any], name: str, value: Any, what: str) -> dict[str, Any]:
    """A copy of `data` in which the field of the dotted `name` is `value`; `what` begins the message of a fault.

    Raises:
        SpecFaults: the name is no dotted name, or goes through a field that is no group.
    """
    result: dict[str, Any] = _deep_copy(data)
    _place(result, name, value, what)
    return result


def _place(result: dict[str, Any], name: str, value: Any, what: str) -> None:
    keys = name.strip().split(".")
    if not all(keys):
        raise SpecFaults([Fault("", f"{what}: write it as field.name=value")])
    node: Any = result
    for depth, key in enumerate(keys):
        pointer = "/" + "/".join(_escape(part) for part in keys[: depth + 1])
        if isinstance(node, list):
            if not key.isdecimal() or int(key) >= len(node):
                raise SpecFaults([Fault(pointer, f"{what}: the list has no entry {key!r}")])
        elif not isinstance(node, dict):
            raise SpecFaults([Fault(pointer, f"{what}: {keys[depth - 1]!r} is no group of fields")])
        place: Any = int(key) if isinstance(node, list) else key
        if depth == len(keys) - 1:
            node[place] = value
        else:
            if isinstance(node, dict) and node.get(place) is None:
                node[place] = {}
            node = node[place]


def override_value(name: str, text: str, what: str) -> Any:
    """The value of a setting given as text, read as YAML; nothing at all is null.

    Raises:
        SpecFaults
    """
    try:
        return _load(text) if text else None
    except SpecFaults as error:
        pointer = "/" + "/".join(_escape(part) for part in name.strip().split("."))
        raise SpecFaults([Fault(pointer, f"{what}: {error.faults[0].message}")]) from error


def map_paths(data: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """A copy of raw spec `data` in which every field that names a file or folder went through `change`."""
    result: dict[str, Any] = _deep_copy(data)
    for _, holder, key in path_places(result, RunSpec):
        holder[key] = change(holder[key])
    return result


def resolve_paths(data: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """A copy of raw spec `data` with relative paths that exist under `base` made absolute.

    A text that is no existing path stays as it is, so that the check that follows names it as it was written.
    """

    def change(text: str) -> str:
        try:
            path = Path(text).expanduser()
            candidate = path if path.is_absolute() else base / path
            return str(candidate.resolve()) if candidate.exists() else text
        except (OSError, ValueError, RuntimeError):  # too long, NUL, no such home, a loop of links
            return text

    return map_paths(data, change)


def spec_paths(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """(pointer, text) of every field of a checked spec that names a file, a folder or a hub id."""
    for pointer, holder, key in path_places(spec.model_dump(mode="json"), RunSpec):
        yield pointer, holder[key]


def spec_schema() -> dict[str, Any]:
    """JSON schema (2020-12) of a run spec: bounds, descriptions, `changeable` and `path` of every field."""
    return RunSpec.model_json_schema()


def _faults(error: ValidationError) -> list[Fault]:
    faults: list[Fault] = []
    for item in error.errors(include_url=False):
        location = tuple(part for part in item["loc"] if part != "[key]")  # pydantic's mark on a name itself
        pointer = "".join(f"/{_escape(str(part))}" for part in location)
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, Misfits):
            faults.extend(Fault(pointer + place, message) for place, message in cause.places)
        else:
            faults.append(Fault(pointer, _message(item, location)))
    return faults


def _message(item: Mapping[str, Any], location: tuple[int | str, ...]) -> str:
    kind, value = item["type"], item.get("input")
    if kind == "extra_forbidden":
        known = _fields_at(location[:-1])
        near = difflib.get_close_matches(str(location[-1]), known, n=1)
        remedy = f"did you mean `{near[0]}`?" if near else "known here: " + ", ".join(known)
        elsewhere = _groups_with(str(location[-1])) if not near else []
        if elsewhere:
            remedy = f"it belongs under `{elsewhere[0]}`"
        return f"unknown field; {remedy}"
    if kind == "missing":
        return f"this field is required: {_description(location)}"
    if kind == "value_error":
        return str(item["ctx"]["error"])
    if kind == "model_type":
        return f"expected a group of fields, got {_kind(value)}. {_description(location)}".rstrip()
    message = str(item["msg"])
    return f"{message[:1].lower()}{message[1:]}, got {_kind(value)}. {_description(location)}".rstrip()


def _model_at(location: tuple[int | str, ...]) -> type[BaseModel] | None:
    model: type[BaseModel] | None = RunSpec
    by_name = False
    for part in location:
        if isinstance(part, int) or by_name:
            by_name = False
            continue
        if model is None or part not in model.model_fields:
            return None
        by_name = holds_names(model.model_fields[part])
        model = group_in(model.model_fields[part].annotation)
    return model


def _fields_at(location: tuple[int | str, ...]) -> list[str]:
    model = _model_at(location)
    return list(model.model_fields) if model else []


def _groups_with(field: str) -> list[str]:
    return [name for name in RunSpec.model_fields if field in _fields_at((name,))]


def _description(location: tuple[int | str, ...]) -> str:
    names = [part for part in location if isinstance(part, str)]
    model = _model_at(tuple(names[:-1])) if names else None
    if model is None or names[-1] not in model.model_fields:
        return ""
    return model.model_fields[names[-1]].description or ""


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _escape(part: str) -> str:
    return part.replace("~", "~0").replace("/", "~1")


def _deep_copy(data: Any, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise SpecFaults([Fault("", _TOO_DEEP)])
    if isinstance(data, Mapping):
        return {key: _deep_copy(value, depth + 1) for key, value in data.items()}
    if isinstance(data, list):
        return [_deep_copy(value, depth + 1) for value in data]
    return data
