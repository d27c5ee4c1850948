"""`--fail-on`: what of a run makes a waiting command leave with exit code 4. CI jobs rely on it."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from ppo.client import Client
from ppo.exits import Exit
from ppo.wire import Alert, Run, Severity

_SEVERITIES: dict[str, tuple[Severity, ...]] = {
    "alert:warning": ("warning", "critical"),
    "alert:critical": ("critical",),
}
# Codes that a tripped alert takes the place of; a run that failed says so itself.
_GIVES_WAY = (Exit.SUCCEEDED, Exit.STOPPED)


class FailOn:
    """The alerts that somebody does not want to see: of these severities, open or cleared, on the active line."""

    def __init__(self, wanted: Sequence[str] | None) -> None:
        for text in wanted or ():
            if text not in _SEVERITIES:
                raise typer.BadParameter(f"{text!r} is none of {', '.join(_SEVERITIES)}", param_hint="--fail-on")
        self._severities = sorted({severity for text in wanted or () for severity in _SEVERITIES[text]})

    def may_trip(self, run: Run) -> bool:
        """Whether the run's counts leave it possible, so that the alerts are worth asking for."""
        counts = run["alerts"]
        loud = counts["critical"] + (counts["warning"] if "warning" in self._severities else 0)
        return bool(self._severities) and loud + counts["snoozed"] > 0

    def alerts(self, client: Client, run_id: str) -> list[Alert]:
        """Those that tripped it, the first raised first."""
        if not self._severities:
            return []
        found = client.alerts.list(run_id=run_id, statuses=("open", "cleared"), severities=self._severities)
        return list(found)[::-1]

    def trips(self, client: Client, run: Run) -> bool:
        """Whether it has tripped while the run goes on."""
        return self.may_trip(run) and bool(self.alerts(client, run["id"]))


def code_with(alerts: Sequence[Alert], code: Exit) -> Exit:
    """What to leave with when the run's own code is `code`."""
    return Exit.TRIPPED if alerts and code in _GIVES_WAY else code
