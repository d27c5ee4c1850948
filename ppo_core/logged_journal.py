"""A journal whose events stand in the trainer's log, too, as far as people want to read them there."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ppo_core.rundir import Event, EventType, Journal, event_line, metrics_line

LOG = logging.getLogger(__name__)


class LoggedJournal:
    """Says an event in `journal` and then in the log."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.last = journal.last

    def append(self, type: EventType, iteration: int, payload: Mapping[str, Any]) -> Event:
        self.last = self._journal.append(type, iteration, payload)
        line = log_line(self.last)
        if line:
            LOG.info("%s", line)
        return self.last

    def close(self) -> None:
        self._journal.close()


def log_line(event: Event) -> str | None:
    """What the log says of an event; None: nothing."""
    payload = event.payload
    match event.type:
        case "started":
            origin = payload["resumed_from"] or "the spec's policy"
            return f"attempt {payload['attempt']} begins with iteration {payload['first_iteration']}, from {origin}"
        case "phase" if payload["phase"] == "loading":
            return "loading"
        case "metrics":
            return f"iteration {event.iteration}: {metrics_line(payload)}"
        case "ack":
            return f"{payload['kind']} ({payload['command']}): {payload['status']}"
        case "end":
            why = f" ({payload['why']})" if payload.get("why") else ""
            return f"ended at iteration {event.iteration}: {payload['reason']}{why}, code {payload['code']}"
    return event_line(event.type, payload)
