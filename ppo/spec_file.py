"""A spec file as the command line takes it: read, settings applied, its relative paths counted from its own folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ppo.client_errors import RequestError
from ppo_core.spec import Fault, SpecFaults, apply_overrides, read_mapping, resolve_paths


def read_spec_file(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The raw spec of a YAML or JSON file.

    Raises:
        SpecFaults: unreadable, not YAML, or a malformed override. The fields themselves are not checked yet.
    """
    return resolve_paths(apply_overrides(read_mapping(_text_of(path)), overrides), path.resolve().parent)


def read_alert_rules(path: Path) -> dict[str, Any]:
    """The `alerts` of a file that has nothing else; their fields are not checked yet.

    Raises:
        SpecFaults: unreadable, not YAML, or of another shape.
    """
    data = read_mapping(_text_of(path))
    alerts = data.get("alerts")
    if len(data) != 1 or not isinstance(alerts, dict):
        message = "alert rules are one group, as in a spec: `alerts: {on_critical: pause}`, or `alerts: {}` for none"
        raise SpecFaults([Fault("", message)])
    return alerts


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SpecFaults([Fault("", f"{path} is not UTF-8 text (byte {error.start})")]) from error
    except OSError as error:
        raise SpecFaults(
            [Fault("", f"{path} cannot be read: {error.strerror}; give the path of a YAML file")]
        ) from error


@contextmanager
def told_how_to_prepare(path: Path, fields: Mapping[str, Any]) -> Iterator[None]:
    """Where a spec is refused whose model is not there, and a `prepare.py` lies beside it: say that this makes it."""
    try:
        yield
    except RequestError as error:
        program = path.resolve().parent / "prepare.py"
        policy = fields.get("policy")
        model = policy.get("model") if isinstance(policy, Mapping) else None
        if error.code == "bad_spec" and isinstance(model, str) and not Path(model).exists() and program.is_file():
            error.errors.append({"pointer": "", "message": f"make what it names first: {_how_to_run(program)}"})
        raise


def _how_to_run(program: Path) -> str:
    """As a module where it lies below the present folder, as the examples do."""
    try:
        inside = program.relative_to(Path.cwd()).with_suffix("")
    except ValueError:
        return f"python {program}"
    return f"python -m {'.'.join(inside.parts)}"
