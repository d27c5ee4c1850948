"""Every place of a spec, a good spec to change there, and the faults that the change gives."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import NoneType
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel

from ppo_core.spec import (
    Fault,
    RunSpec,
    SpecFaults,
    parse_spec,
)

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
