"""From a submitted spec to one that may run: read, paths found under the roots, every fault at once."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from api.schemas import Preset, SpecBody
from ppo_core.spec import (
    EngineHosts,
    Fault,
    RewardHosts,
    RunSpec,
    SpecFaults,
    check_files,
    fill_alerts,
    map_paths,
    parse_spec,
    read_mapping,
    resolve_paths,
)
from ppo_core.spec.hub import is_hub
from ppo_core.spec.loading import MAX_SPEC_BYTES


class Submission(NamedTuple):
    """A submitted spec, checked, and the dotted names of what the platform's alert rules filled in."""

    spec: RunSpec
    from_alert_rules: tuple[str, ...]


def accept_submission(
    body: SpecBody,
    alert_rules: Mapping[str, Any],
    roots: Sequence[Path],
    hosts: RewardHosts,
    engine_hosts: EngineHosts,
) -> Submission:
    """What a new run would be: the spec with the platform's alert rules where it says nothing, checked.

    A spec that is stored with a run has been through here, so it is whole, and later rules change nothing of it.

    Raises:
        SpecFaults: with every fault found; nothing was stored.
    """
    filled = fill_alerts(_read(body), alert_rules)
    return Submission(_checked(filled.data, roots, hosts, engine_hosts), filled.from_rules)


def accept_spec(body: SpecBody, roots: Sequence[Path], hosts: RewardHosts, engine_hosts: EngineHosts) -> RunSpec:
    """The checked spec, with absolute paths: one that is whole already, as a run's own.

    Raises:
        SpecFaults: with every fault found; nothing was stored.
    """
    return _checked(_read(body), roots, hosts, engine_hosts)


def _read(body: SpecBody) -> dict[str, Any]:
    data = read_mapping(body.spec_yaml) if body.spec_yaml is not None else dict(body.spec or {})
    faults = [Fault(pointer, "holds a NUL character, which cannot be kept; leave it out") for pointer in _nuls(data)]
    if len(json.dumps(data, default=str)) > MAX_SPEC_BYTES:
        faults.append(Fault("", f"the spec is longer than {MAX_SPEC_BYTES} bytes"))
    if faults:
        raise SpecFaults(faults)
    return data


def _checked(data: dict[str, Any], roots: Sequence[Path], hosts: RewardHosts, engine_hosts: EngineHosts) -> RunSpec:
    for root in roots:  # The first root that has the file wins: what was found is absolute from then on.
        data = resolve_paths(data, root)
    spec = parse_spec(data)
    faults = check_files(spec, roots, hosts, engine_hosts)
    if faults:
        raise SpecFaults(faults)
    return spec


def spec_fields(spec: RunSpec) -> dict[str, Any]:
    """The full effective spec, defaults included, as it is stored."""
    return spec.model_dump(mode="json")


def spec_yaml(fields: dict[str, Any]) -> str:
    """A stored spec as YAML, in the order of the documentation and not in the database's."""
    with contextlib.suppress(SpecFaults):  # Stored by an older version with other fields: shown as it is.
        fields = spec_fields(parse_spec(fields))
    return yaml.safe_dump(fields, sort_keys=False, allow_unicode=True, width=120)


def presets(roots: Sequence[Path]) -> list[Preset]:
    """Specs to begin with: `examples/*/spec.yaml` under the roots, the first root's where a name comes twice."""
    found: dict[str, Preset] = {}
    for root in roots:
        for path in sorted(root.glob("examples/*/spec.yaml")):
            preset = _preset(path)
            if preset is not None:
                found.setdefault(preset.name, preset)
    return list(found.values())


def _preset(path: Path) -> Preset | None:
    try:
        text = path.read_text(encoding="utf-8")
        data = read_mapping(text)
    except (OSError, UnicodeDecodeError, SpecFaults):
        return None  # An unreadable example is no preset; whoever submits it by hand sees why.
    comments = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        comments.append(line.lstrip("# ").rstrip())
    name = path.parent.name
    return Preset(
        name=name,
        title=str(data.get("name", name)),
        description=" ".join(comments).strip(),
        spec_yaml=_with_absolute_paths(text, data, path.parent),
    )


def _with_absolute_paths(text: str, data: dict[str, Any], folder: Path) -> str:
    """The same text, comments kept, with relative paths counted from the spec's own folder, as the command line does.

    Once it is submitted nobody knows any more which folder it came from.
    """
    moved: dict[str, str] = {}

    def absolute(path: str) -> str:
        moved[path] = path if is_hub(path) or Path(path).is_absolute() else str((folder / path).resolve())
        return moved[path]

    wanted = map_paths(data, absolute)
    for old in sorted(moved, key=len, reverse=True):
        value = re.compile(rf"(?<=[\s\[{{,])(['\"]?){re.escape(old)}\1(?=[\s\]}},]|$)")
        text = value.sub(lambda _, new=moved[old]: json.dumps(new, ensure_ascii=False), text)  # type: ignore[misc]
    with contextlib.suppress(SpecFaults):
        if read_mapping(text) == wanted:
            return text
    return yaml.safe_dump(wanted, sort_keys=False, allow_unicode=True, width=120)


def _nuls(value: Any, pointer: str = "") -> Iterator[str]:
    if isinstance(value, str):
        if "\x00" in value:
            yield pointer
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _nuls(item, f"{pointer}/{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _nuls(item, f"{pointer}/{index}")
