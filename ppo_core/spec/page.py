"""The run spec as a page of documentation, from the same fields that check it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ppo_core.spec.fields import every_field, group_in, group_mark
from ppo_core.spec.run_spec import RunSpec

_HEAD = """# The run spec

Made by `python -m ppo_core.spec`; change `ppo_core/spec/`, not this page.

A spec is YAML (or JSON). Unknown fields are refused. All faults of fields are named at once, then all between groups,
then all of the files that it names. `May change` says when a stored run may take another value: `rollback` (a new
segment of the same run), `fork` (only a new run), `never`. A field without a default is required. Where only one value
is allowed, the field keeps a place for choices to come.
"""


def page() -> str:
    """Markdown with every field, by group."""
    parts = [_HEAD]
    parts.extend(_table("The run", RunSpec, ""))
    for prefix, model in _groups():
        parts.extend(_table(f"`{prefix}`", model, prefix))
    return "\n".join(parts).replace("\n\n\n", "\n\n") + "\n"


def _groups() -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in every_field(RunSpec):
        group = group_in(field.annotation)
        if group is not None:
            yield name + group_mark(field), group


def _table(title: str, model: type[BaseModel], prefix: str) -> Iterator[str]:
    yield f"\n## {title}\n\n{inspect.getdoc(model) or ''}\n"
    if not model.model_fields:
        return
    yield "| field | kind | default | bounds | may change | what it is |\n|---|---|---|---|---|---|"
    for name, field in model.model_fields.items():
        full = f"{prefix}.{name}" if prefix else name
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        cells = (
            f"`{full}`",
            _kind(field.annotation),
            _default(field),
            _bounds(field),
            str(extra.get("changeable", "")),
            (field.description or ""),
        )
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _kind(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(_code(value) for value in args)
    if origin in (Union, UnionType):
        return " or ".join(_kind(choice) for choice in args)
    if origin is list:
        return f"list of {_kind(args[0])}s" if group_in(annotation) is None else "list of groups"
    if origin is dict:
        return f"{_kind(args[1])} by name"
    if origin is not None and args:  # Annotated
        return _kind(args[0])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "group"
    names = {int: "whole number", float: "number", str: "text", bool: "true or false", NoneType: "null", None: "null"}
    return names[annotation]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return "see below" if isinstance(field.default, BaseModel) else _code(field.default)


def _code(value: Any) -> str:
    return f"`{json.dumps(value, ensure_ascii=False)}`"


def _bounds(field: FieldInfo) -> str:
    words = {
        "ge": "≥ {}",
        "gt": "> {}",
        "le": "≤ {}",
        "lt": "< {}",
        "min_length": "at least {} long",
        "max_length": "at most {} long",
    }
    found = {name: getattr(rule, name) for rule in field.metadata for name in words if hasattr(rule, name)}
    if found.get("ge") is not None and found.get("ge") == found.get("le"):
        return f"only {found['ge']:g}"
    return ", ".join(
        words[name].format(f"{value:,}" if isinstance(value, int) else f"{value:g}")
        for name, value in found.items()
        if value is not None
    )
