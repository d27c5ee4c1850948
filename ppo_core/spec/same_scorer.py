"""Whether a judge is one of the run's reward sources under another name or in another place.

A judge that shares the reward's weights or code cannot see it being hacked. Two model folders are the same where they
hold the same tensors, whatever their files, shards, times and configs are; two functions where their names lead to one
object. Loads no model and runs no function.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from ppo_core.spec.loading import Fault
from ppo_core.spec.run_spec import RunSpec
from ppo_core.spec.scorers import JUDGE_FUNCTIONS, REWARD_FUNCTIONS

READ_BYTES = 1 << 20
# A header of a safetensors file is bounded by its format.
MAX_HEADER_BYTES = 100_000_000
# What reading the tensors' places of a folder may raise.
UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError)
REMEDY = "it cannot see that reward being hacked; name a judge that shares nothing with the reward"


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor's bytes lie, and what they stand for."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int  #: byte of the file
    num_bytes: int


def same_scorer_faults(spec: RunSpec) -> Iterator[Fault]:
    """A fault for each reward source that the judge is by its content. Folders that cannot be read are passed over:
    other checks name them."""
    judge = spec.gate.judge
    if judge is None:
        return
    for index, source in enumerate(spec.reward.sources):
        if judge.model is not None and source.model is not None and same_weights(judge.model, source.model):
            yield Fault(
                "/gate/judge/model",
                f"{judge.model!r} holds the very weights of reward.sources.{index}.model {source.model!r}: {REMEDY}",
            )
        if judge.name is not None and source.name is not None:
            target = _target(JUDGE_FUNCTIONS, judge.name)
            if target is not None and target == _target(REWARD_FUNCTIONS, source.name):
                yield Fault(
                    "/gate/judge/name",
                    f"{judge.name!r} is the function {target} of reward.sources.{index}.name {source.name!r}: {REMEDY}",
                )


def same_weights(one: str | Path, other: str | Path) -> bool:
    """Whether two model folders hold the same tensors: names, types, shapes and every byte.

    Compared smallest first: models that differ mostly do so in their head, and then little is read.
    """
    try:
        first, second = tensor_places(Path(one)), tensor_places(Path(other))
        kinds = [{name: (at.dtype, at.shape) for name, at in places.items()} for places in (first, second)]
        if not first or kinds[0] != kinds[1]:
            return False
        return all(_same_bytes(first[name], second[name]) for name in sorted(first, key=lambda n: first[n].num_bytes))
    except UNREADABLE:
        return False


def tensor_places(folder: Path) -> dict[str, TensorPlace]:
    """Every tensor that is loaded from a model folder, by name, from the headers of its safetensors files.

    Raises:
        OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError: a file cannot be read, or is none of
            that form.
    """
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        files = [whole]
    elif index.is_file():
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = [folder / Path(name).name for name in sorted(set(shards.values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    return {name: place for file in files for name, place in _places_in(file)}


def _places_in(file: Path) -> Iterator[tuple[str, TensorPlace]]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= MAX_HEADER_BYTES:
            raise ValueError(f"{file} has no safetensors header")
        header = json.loads(stream.read(length))
        if not isinstance(header, dict):
            raise ValueError(f"the header of {file} is no object")
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            yield name, TensorPlace(file, entry["dtype"], tuple(entry["shape"]), 8 + length + begin, end - begin)


def _same_bytes(one: TensorPlace, other: TensorPlace) -> bool:
    if one.num_bytes != other.num_bytes:
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.begin)
        second.seek(other.begin)
        left = one.num_bytes
        while left > 0:
            wanted = min(left, READ_BYTES)
            part = first.read(wanted)
            if len(part) != wanted or part != second.read(wanted):
                return False
            left -= wanted
    return True


def _target(group: str, name: str) -> str | None:
    """The object that a registered name leads to, as `module:attribute`; None where it is not registered."""
    return next((entry.value.replace(" ", "") for entry in entry_points(group=group) if entry.name == name), None)
