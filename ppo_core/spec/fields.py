"""Which fields a group of a run spec has, its nested groups' included, and which of them name a file.

Whatever needs "every field" walks here, so that a new one is seen by the docs, by the check of paths and by the tests
without being listed anywhere. It knows no single field.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo


def every_field(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every field with its dotted name: `update.learning_rate`, `reward.sources[].weight`, `alerts.bands.*.high`;
    groups before what is in them.
    """
    for name, field in model.model_fields.items():
        yield prefix + name, field
        group = group_in(field.annotation)
        if group is not None:
            yield from every_field(group, prefix + name + group_mark(field) + ".")


def group_in(annotation: Any) -> type[BaseModel] | None:
    """The group that a field of this annotation holds: itself, or null, or several. None for plain values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((group for part in get_args(annotation) if (group := group_in(part)) is not None), None)


def holds_list(field: FieldInfo) -> bool:
    """Whether the field is a list, or null in its place."""
    return list in (get_origin(field.annotation), *map(get_origin, get_args(field.annotation)))


def holds_names(field: FieldInfo) -> bool:
    """Whether the field is a mapping whose keys are names that the user gives, such as metrics."""
    return get_origin(field.annotation) is dict


def group_mark(field: FieldInfo) -> str:
    """What a dotted name has after a field that holds several groups: `[]` for a list, `.*` by name."""
    return "[]" if holds_list(field) else ".*" if holds_names(field) else ""


def names_path(field: FieldInfo) -> bool:
    """Whether the field's text names a file, a folder or a hub id: what `setting(..., path=True)` marks."""
    extra = field.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("path"))


def path_places(data: Any, model: type[BaseModel], pointer: str = "") -> Iterator[tuple[str, dict[str, Any], str]]:
    """(JSON pointer, mapping, key) of each text in raw `data` that stands where `model` has a field that names a path.

    `data` is one group or a list of them. What does not have the model's shape is passed over; others check that.
    """
    for index, entry in enumerate(data if isinstance(data, list) else ()):
        yield from path_places(entry, model, f"{pointer}/{index}")
    if not isinstance(data, dict):
        return
    for name, field in model.model_fields.items():
        value, place = data.get(name), f"{pointer}/{name}"
        if names_path(field) and isinstance(value, str):
            yield place, data, name
        group = group_in(field.annotation)
        if group is not None and holds_names(field):
            for key, entry in value.items() if isinstance(value, dict) else ():
                yield from path_places(entry, group, f"{place}/{key}")
        elif group is not None:
            yield from path_places(value, group, place)
