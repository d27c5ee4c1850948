"""The registry as a page of documentation."""

from __future__ import annotations

from ppo_core.registry import METRICS, PANELS, Band, Metric

_HEAD = """# Metrics

Made by `python -m ppo_core.registry`; change `ppo_core/registry/`, not this page.

Every name is used as it stands in charts, in the API and in alerts. A name that ends in `*` is a family:
`policy/approx_kl/epoch_1`. Bands are heuristics to start from, not laws; "In `alerts.bands`" is how a spec would write
a metric's own, and what bounds there are measured in. A value that is undefined in an iteration is null, never 0.
"""

_WHEN = {
    "iteration": "every iteration",
    "evaluation": "with an evaluation, and at iteration 0",
    "gate": "with a judge gate",
    "if used": "where the spec or the iteration has what it is about",
}
_BETTER = {"higher": "higher is better", "lower": "lower is better", "none": "neither direction is better by itself"}


def page() -> str:
    """Markdown with every metric, by panel."""
    parts = [_HEAD]
    for panel, title in PANELS.items():
        parts.append(f"\n## {title}\n")
        parts.extend(_entry(entry) for entry in METRICS.values() if entry.panel == panel)
    return "".join(parts)


def _entry(entry: Metric) -> str:
    lines = [f"\n### `{entry.name}`\n", f"**{entry.title}** ({entry.unit}). {entry.formula}\n"]
    lines.append(f"- Weighting: {entry.weighting}; {_BETTER[entry.direction]}; reported {_WHEN[entry.when]}.")
    if entry.legal is not None:
        lines.append(f"- Legal: {_range(*entry.legal)}.")
    if entry.band is not None:
        lines.append(f"- Healthy: {entry.band.text}")
        lines.append(f"- In `alerts.bands`: `{{{_bounds(entry.band)}}}`, bounds of {entry.band.measured}.")
    lines.append(f"- Reading: {entry.meaning}")
    lines.append(f"- Remedy: {entry.remedy}")
    return "\n".join(lines) + "\n"


def _bounds(band: Band) -> str:
    return ", ".join(f"{name}: {bound:g}" for name, bound in band.bounds.items())


def _range(low: float | None, high: float | None) -> str:
    if low is None:
        return f"at most {high:g}"
    return f"at least {low:g}" if high is None else f"{low:g} to {high:g}"
