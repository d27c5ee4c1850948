"""Whether a run under one spec can go on from a checkpoint that was written under another: are the same things trained?

It compares what decides which parameters there are and what they mean; sizes of the model itself are seen when the
tensors are read. It knows no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ppo_core.spec.run_spec import RunSpec


def misfits_with_checkpoint(spec: RunSpec, kept_spec: Mapping[str, Any]) -> dict[str, str]:
    """Fields of `spec` that make other trained parameters than the checkpoint holds: JSON pointer to message.

    Args:
        spec: of the run that is to go on.
        kept_spec: the spec that the checkpoint was written under, as it was stored.
    """
    kept = kept_spec["policy"]
    now = spec.policy.model_dump(mode="json")
    misfits = {}
    for name in ("lora", "value_head", "dtype"):
        if _kind(name, now[name]) != _kind(name, kept[name]):
            misfits[f"/policy/{name}"] = (
                f"policy.{name} is {_shown(now[name])}, but the checkpoint was written under {_shown(kept[name])}; set "
                f"policy.{name} to that, or start a new run from a policy folder"
            )
    return misfits


def _kind(name: str, value: Any) -> Any:
    """A head on the trunk is the same parameters, whether its loss moves the trunk or not."""
    return "head" if name == "value_head" and value in ("shared", "shared_detached") else value


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    return ", ".join(f"{key} {each}" for key, each in value.items()) if isinstance(value, dict) else str(value)
