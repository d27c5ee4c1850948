"""Journal events as lines for people: in the trainer's log, and in a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What says in one line whether an iteration went well.
LINE_METRICS = ("reward/score_mean", "heldout/score_mean", "kl/ref_sequence", "policy/entropy", "response/length_mean")


def number(value: object) -> str:
    """A metric's value for people; a dash where it is undefined."""
    return f"{value:.4g}" if isinstance(value, int | float) else "–"


def metrics_line(metrics: Mapping[str, Any]) -> str:
    """The few metrics that tell most, as far as they are there."""
    return ", ".join(f"{name} {number(metrics[name])}" for name in LINE_METRICS if name in metrics)


def event_line(type: str, payload: Mapping[str, Any]) -> str | None:
    """A line for events that people want to read; None for the others. Those of metrics: `metrics_line`."""
    if type == "checkpoint":
        return f"checkpoint {payload.get('path', '')} ({payload.get('reason', '')})"
    if type == "alert":
        remedy = payload.get("remedy") if payload.get("status") in ("raised", "escalated") else None
        return alert_line(payload) + (f". {remedy}" if remedy else "")
    if type == "preflight":
        return preflight_lines(payload)
    if type == "gate":
        return str(payload.get("explanation", ""))
    if type == "note":
        return f"{payload.get('level', 'info')}: {payload.get('message', '')}"
    return None


def preflight_lines(payload: Mapping[str, Any]) -> str:
    """What the checks before the first iteration found, each that is not in order on a line of its own."""
    bad = [each for each in payload.get("findings", []) if each.get("status") != "ok"]
    lines = [f"  {each['status']}: {each['detail']}. {each['remedy']}".rstrip() for each in bad]
    return "\n".join([f"checks before the first iteration: {len(bad) or 'nothing'} to look at", *lines])


def alert_line(payload: Mapping[str, Any]) -> str:
    """What happened to an alert."""
    status, title = payload.get("status"), payload.get("title", "")
    if status in ("raised", "escalated"):
        return f"▲ {payload.get('severity', 'warning')}: {title}"
    return f"alert {status}: {title}"
