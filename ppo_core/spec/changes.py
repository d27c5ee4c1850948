"""What changes between two specs: setting fields by dotted names, the difference, and whether a stored run may have it.

A dotted name is a field's place: `kl.coef`, `reward.sources.0.weight`. Each field says by itself when it may change
(`setting(..., changeable)`): on a roll back, only on a fork, or never. Specs here are plain data, defaults filled in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel

from ppo_core.spec.fields import holds_names
from ppo_core.spec.loading import Fault, SpecFaults, override_value, place_value
from ppo_core.spec.run_spec import RunSpec
from ppo_core.spec.setting import Changeable

_STRICTEST: tuple[Changeable, ...] = ("rollback", "fork", "never")

# What these say is looked at beside the training: whatever they are, the iterations come out the same.
_BESIDE_THE_NUMBERS = (
    "name", "checkpoints", "samples", "alerts", "preflight", "evaluation", "gate", "resources.priority",
    "resources.max_hours", "training.peer_timeout_s",
)  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """A field that two specs have different values of."""

    path: str
    before: Any
    after: Any


def apply_settings(data: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `data` with each dotted field of `settings` set to its value.

    Raises:
        SpecFaults: names that lead nowhere, all of them, each with the pointer `/set/<name>`.
    """
    result: dict[str, Any] = dict(data)
    faults: list[Fault] = []
    for name, value in settings.items():
        try:
            result = place_value(result, name, value, f"set {name!r}")
        except SpecFaults as error:
            faults.extend(Fault(f"/set/{_escape(name)}", fault.message) for fault in error.faults)
    if faults:
        raise SpecFaults(faults)
    return result


def read_settings(overrides: Iterable[str]) -> dict[str, Any]:
    """`field.name=value` texts, as a command line has them, as settings by name; values are read as YAML.

    Raises:
        SpecFaults
    """
    settings = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals or not name.strip():
            raise SpecFaults([Fault("", f"--set {override!r}: write it as field.name=value")])
        settings[name.strip()] = override_value(name, text, f"--set {override!r}")
    return settings


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    """Every field that differs, by name, in the order of the first spec; groups are looked into, lists of one length,
    too.
    """
    return list(_differences(before, after, ""))


def changeable(path: str) -> Changeable:
    """When the field of this dotted name may change: its own word, where several kinds have it the strictest."""
    models: list[type[BaseModel]] = [RunSpec]
    found: list[Changeable] = []
    by_name = False
    for part in path.split("."):
        if part.isdecimal() or by_name:  # a place in a list, or a name that the user gave
            by_name = False
            continue
        fields = [model.model_fields[part] for model in models if part in model.model_fields]
        if not fields:
            return "never"
        extras = [field.json_schema_extra for field in fields]
        words = [extra.get("changeable") for extra in extras if isinstance(extra, dict)]
        found = [word for word in _STRICTEST if word in words] or found
        models = [group for field in fields for group in _groups_in(field.annotation)]
        by_name = any(holds_names(field) for field in fields)
    return found[-1]


def refusals(changes: Iterable[Difference], settings: Mapping[str, Any], *, fork: bool) -> list[Fault]:
    """A fault for each change that a roll back (or a fork) may not make, with the remedy.

    The pointer names the setting that asked for it.
    """
    faults = []
    for change in changes:
        rule = changeable(change.path)
        if rule == "rollback" or (rule == "fork" and fork):
            continue
        if rule == "fork":
            message = f"{change.path} cannot change within a run (it is {_short(change.before)}): fork instead"
        elif change.path == "name":
            message = "name cannot change within a run; a fork takes its own beside `set`, as `name`"
        else:
            message = f"{change.path} can never change (it is {_short(change.before)}): submit a new run instead"
        faults.append(Fault(pointer_of(change.path, settings), message))
    return faults


def pointer_of(path: str, settings: Mapping[str, Any]) -> str:
    """`/set/<name>` of the setting that decides the field `path`; the field's own pointer where none does."""
    for name in settings:
        if path == name or path.startswith(f"{name}.") or name.startswith(f"{path}."):
            return f"/set/{_escape(name)}"
    return "/" + "/".join(_escape(part) for part in path.split("."))


def repeats(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether iterations of `after` come out like those of `before`, from one checkpoint: no number depends on what
    changed.

    The number of iterations decides nothing but where the learning rate's schedule ends, when it has one.
    """
    has_schedule = (after.get("update") or {}).get("lr_schedule", "constant") != "constant"
    beside = _BESIDE_THE_NUMBERS if has_schedule else (*_BESIDE_THE_NUMBERS, "iterations")
    return all(
        any(change.path == name or change.path.startswith(f"{name}.") for name in beside)
        for change in differences(before, after)
    )


def _differences(before: Any, after: Any, path: str) -> Iterator[Difference]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in dict.fromkeys([*before, *after]):
            yield from _differences(before.get(key), after.get(key), f"{path}.{key}" if path else key)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from _differences(one, other, f"{path}.{index}")
    elif before != after or isinstance(before, bool) != isinstance(after, bool):
        yield Difference(path, before, after)


def _groups_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [group for part in get_args(annotation) for group in _groups_in(part)]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _escape(part: str) -> str:
    return part.replace("~", "~0").replace("/", "~1")


def too_few_iterations(iterations: int, reached: int) -> str | None:
    """Why a run cannot go on from a checkpoint of iteration `reached` under this many, with the remedy; or None."""
    if iterations >= reached:
        return None
    return (
        f"iterations is {iterations} but the checkpoint was made after iteration {reached}: set it to {reached} or "
        f"more, above {reached} to train on"
    )
