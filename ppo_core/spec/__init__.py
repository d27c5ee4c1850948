"""The run spec: a door, importable without torch."""

from ppo_core.errors import SpecError
from ppo_core.spec.files import check_files
from ppo_core.spec.hosts import RewardHosts
from ppo_core.spec.loading import (
    Fault,
    SpecFaults,
    apply_overrides,
    map_paths,
    parse_spec,
    read_mapping,
    resolve_paths,
    spec_paths,
    spec_schema,
)
from ppo_core.spec.run_spec import RunSpec

__all__ = [
    "Fault",
    "RewardHosts",
    "RunSpec",
    "SpecError",
    "SpecFaults",
    "apply_overrides",
    "check_files",
    "map_paths",
    "parse_spec",
    "read_mapping",
    "resolve_paths",
    "spec_paths",
    "spec_schema",
]
