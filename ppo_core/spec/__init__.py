"""The run spec: a door, importable without torch."""

from ppo_core.errors import SpecError
from ppo_core.spec.alert_rules import Filled, fill_alerts
from ppo_core.spec.changes import (
    Difference,
    apply_settings,
    changeable,
    differences,
    pointer_of,
    read_settings,
    refusals,
    repeats,
    too_few_iterations,
)
from ppo_core.spec.continuing import misfits_with_checkpoint
from ppo_core.spec.files import check_files
from ppo_core.spec.hosts import EngineHosts, RewardHosts
from ppo_core.spec.loading import (
    Fault,
    SpecFaults,
    apply_overrides,
    map_paths,
    parse_alert_rules,
    parse_spec,
    read_mapping,
    resolve_paths,
    spec_paths,
    spec_schema,
    with_defaults,
)
from ppo_core.spec.run_spec import RunSpec

__all__ = [
    "Difference",
    "EngineHosts",
    "Fault",
    "Filled",
    "RewardHosts",
    "RunSpec",
    "SpecError",
    "SpecFaults",
    "apply_overrides",
    "apply_settings",
    "changeable",
    "check_files",
    "differences",
    "fill_alerts",
    "map_paths",
    "misfits_with_checkpoint",
    "parse_alert_rules",
    "parse_spec",
    "pointer_of",
    "read_mapping",
    "read_settings",
    "refusals",
    "repeats",
    "resolve_paths",
    "spec_paths",
    "spec_schema",
    "too_few_iterations",
    "with_defaults",
]
