"""A spec file as the command line takes it: read, settings applied, its relative paths counted from its own folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ppo_core.spec import Fault, SpecFaults, apply_overrides, read_mapping, resolve_paths


def read_spec_file(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The raw spec of a YAML or JSON file.

    Raises:
        SpecFaults: unreadable, not YAML, or a malformed override. The fields themselves are not checked yet.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SpecFaults([Fault("", f"{path} is not UTF-8 text (byte {error.start})")]) from error
    except OSError as error:
        raise SpecFaults(
            [Fault("", f"{path} cannot be read: {error.strerror}; give the path of a YAML file")]
        ) from error
    return resolve_paths(apply_overrides(read_mapping(text), overrides), path.resolve().parent)
