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
from ppo_core.spec.run_spec import RunSpec

MAX_SPEC_BYTES = 256 * 1024


@dataclass(frozen=True)
class Fault:
    """One thing wrong with a spec. `pointer` is a JSON pointer (RFC 6901): `/update/learning_rate`."""

    pointer: str
    message: str

    def __str__(self) -> str:
        return f"{self.pointer or '/'}: {self.message}"


class SpecFaults(SpecError):
    """A spec with faults: all of them, in the order of the spec."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__("; ".join(str(fault) for fault in self.faults))


class _StrictLoader(yaml.SafeLoader):
    """YAML without the traps: a key given twice is an error, and 1e-4 is a number as it is in JSON."""


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


def _float_like_json(loader: _StrictLoader, node: yaml.ScalarNode) -> float:
    return float(str(node.value).replace("_", ""))


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_duplicates)
_StrictLoader.add_constructor("!json-float", _float_like_json)
_StrictLoader.add_implicit_resolver(  # YAML 1.1 reads 1e-4 as text; everybody means the number
    "!json-float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_mapping(text: str) -> dict[str, Any]:
    """Parse YAML (of which JSON is a part) to a mapping.

    Raises:
        SpecFaults: too long, not YAML (with line and column), aliases, or not a mapping.
    """
    if len(text.encode("utf-8", "surrogatepass")) > MAX_SPEC_BYTES:
        raise SpecFaults([Fault("", f"the spec is longer than {MAX_SPEC_BYTES} bytes")])
    try:
        # Aliases can blow a short text up to gigabytes, and no spec needs them.
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            raise SpecFaults([Fault("", "YAML aliases (*name) are not allowed; write the value out")])
        data = yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise SpecFaults([Fault("", f"not valid YAML: {place}{error.problem or error.context}")]) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SpecFaults([Fault("", f"not valid YAML: {error}")]) from error
    if not isinstance(data, dict):
        raise SpecFaults([Fault("", f"a spec is a mapping of fields, this is {_kind(data)}; begin with `name: ...`")])
    return data


def parse_spec(source: str | Mapping[str, Any]) -> RunSpec:
    """Check a spec given as YAML text or as a mapping.

    Raises:
        SpecFaults: with every fault found, each with its pointer, the value and a remedy.
    """
    data = read_mapping(source) if isinstance(source, str) else dict(source)
    try:
        return RunSpec.model_validate(data)
    except ValidationError as error:
        raise SpecFaults(_faults(error)) from error


def apply_overrides(data: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy of `data` with `dotted.field=value` settings applied; values are read as YAML.

    Raises:
        SpecFaults: an override without `=`, or one that goes through a field that is no group.
    """
    result: dict[str, Any] = _deep_copy(data)
    for override in overrides:
        name, equals, value = override.partition("=")
        keys = name.strip().split(".")
        if not equals or not all(keys):
            raise SpecFaults([Fault("", f"--set {override!r}: write it as field.name=value")])
        node: Any = result
        for depth, key in enumerate(keys[:-1]):
            node = node.setdefault(key, {}) if isinstance(node, dict) else node[int(key)]
            if not isinstance(node, dict | list):
                raise SpecFaults(
                    [Fault("/" + "/".join(keys[: depth + 1]), f"--set {override!r}: this is no group of fields")]
                )
        try:
            parsed = yaml.load(value, Loader=_StrictLoader) if value else None
        except yaml.YAMLError as error:
            raise SpecFaults(
                [Fault("/" + "/".join(keys), f"--set {override!r}: the value is not valid YAML")]
            ) from error
        try:
            node[int(keys[-1]) if isinstance(node, list) else keys[-1]] = parsed
        except (ValueError, IndexError) as error:
            raise SpecFaults([Fault("/" + "/".join(keys), f"--set {override!r}: no such entry of the list")]) from error
    return result


def map_paths(data: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """A copy of raw spec `data` in which every field that names a file or folder went through `change`."""
    result: dict[str, Any] = _deep_copy(data)
    for holder, key in _path_places(result):
        if isinstance(holder.get(key), str):
            holder[key] = change(holder[key])
    return result


def resolve_paths(data: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """A copy of raw spec `data` with relative paths that exist under `base` made absolute.

    A text that is no existing path stays as it is, so that the check that follows names it as it was written.
    """

    def change(text: str) -> str:
        path = Path(text).expanduser()
        try:
            candidate = path if path.is_absolute() else base / path
            return str(candidate.resolve()) if candidate.exists() else text
        except OSError:
            return text

    return map_paths(data, change)


def spec_paths(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """(pointer, text) of every field of a checked spec that names a file, a folder or a hub id."""
    yield "/policy/model", spec.policy.model
    yield "/data/prompts", spec.data.prompts
    if spec.data.held_out is not None:
        yield "/data/held_out", spec.data.held_out
    for index, source in enumerate(spec.reward.sources):
        if source.model is not None:
            yield f"/reward/sources/{index}/model", source.model
    if spec.gate.judge is not None and spec.gate.judge.model is not None:
        yield "/gate/judge/model", spec.gate.judge.model


def spec_schema() -> dict[str, Any]:
    """JSON schema (2020-12) of a run spec: bounds, descriptions, `changeable` and `path` of every field."""
    return RunSpec.model_json_schema()


def _path_places(data: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    def group(name: str) -> dict[str, Any]:
        found = data.get(name)
        return found if isinstance(found, dict) else {}

    yield group("policy"), "model"
    yield group("data"), "prompts"
    yield group("data"), "held_out"
    sources = group("reward").get("sources")
    for source in sources if isinstance(sources, list) else []:
        if isinstance(source, dict):
            yield source, "model"
    judge = group("gate").get("judge")
    if isinstance(judge, dict):
        yield judge, "model"


def _faults(error: ValidationError) -> list[Fault]:
    faults = []
    for item in error.errors(include_url=False):
        location = item["loc"]
        pointer = "".join(f"/{_escape(str(part))}" for part in location)
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
    message = str(item["msg"])
    return f"{message[:1].lower()}{message[1:]}, got {_kind(value)}. {_description(location)}".rstrip()


def _model_at(location: tuple[int | str, ...]) -> type[BaseModel] | None:
    model: Any = RunSpec
    for part in location:
        if isinstance(part, int):
            continue
        if not (isinstance(model, type) and issubclass(model, BaseModel)) or part not in model.model_fields:
            return None
        annotation = model.model_fields[part].annotation
        nested = [
            choice
            for choice in (annotation, *getattr(annotation, "__args__", ()))
            if isinstance(choice, type) and issubclass(choice, BaseModel)
        ]
        model = nested[0] if nested else None
    return model if isinstance(model, type) else None


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


def _deep_copy(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {key: _deep_copy(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_deep_copy(value) for value in data]
    return data
