"""Every metric, defined once: the source for charts, tooltips, docs, API and alert rules. A door, without torch.

    metric("policy/approx_kl/epoch_3").title
    python -m ppo_core.registry > docs/metrics.md

It knows definitions only: values are computed in `ppo_core`, kept by the journal and the store. Bands are starting
values, heuristics that a run may override.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

from ppo_core.registry import evaluation, generation, kl, policy, reward, system, value
from ppo_core.registry.definition import PANELS, Band, Metric

METRICS: dict[str, Metric] = {
    entry.name: entry
    for panel in (reward, kl, policy, value, generation, evaluation, system)
    for entry in panel.METRICS
}

_FAMILIES = [
    (re.compile(re.escape(name).replace(r"\*", r"[A-Za-z0-9_]+")), entry)
    for name, entry in METRICS.items()
    if name.endswith("*")
]


def metric(name: str) -> Metric:
    """The definition of a metric, or of the family that it belongs to.

    Raises:
        KeyError: no such metric.
    """
    if name in METRICS:
        return METRICS[name]
    for pattern, entry in _FAMILIES:
        if pattern.fullmatch(name):
            return entry
    raise KeyError(f"no metric is called {name!r}")


def as_json() -> list[dict[str, Any]]:
    """The whole registry as JSON can hold it, in the order of the panels."""
    order = list(PANELS)
    return [asdict(entry) for entry in sorted(METRICS.values(), key=lambda entry: order.index(entry.panel))]


__all__ = ["METRICS", "PANELS", "Band", "Metric", "as_json", "metric"]
