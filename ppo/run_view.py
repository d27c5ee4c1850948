"""How a run looks in a terminal while it goes: a live table with bars, or plain lines where there is no terminal.

It is fed events, from a journal or from the api alike, and knows neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ppo_core.rundir import alert_line, metrics_line, number
from ppo_core.rundir import event_line as journal_line

# What tells first whether a run goes well; the pages show all.
MAIN_METRICS = (
    "reward/score_mean",
    "heldout/score_mean",
    "judge/score_mean",
    "kl/ref_sequence",
    "policy/approx_kl",
    "policy/clip_fraction",
    "policy/entropy",
    "value/explained_variance",
    "response/length_mean",
    "response/eos_rate",
    "policy/first_minibatch_ratio_max_dev",
)


class RunView(Protocol):
    """Shows a run. A context manager, since a live display has to be put away."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def phase(self, name: str) -> None:
        """What the run does now."""

    def event(self, type: str, iteration: int | None, payload: Mapping[str, Any]) -> None:
        """Something happened."""

    def say(self, line: str) -> None:
        """A line that stays."""


def view_for(console: Console, num_iterations: int) -> RunView:
    """A live view on a terminal, lines elsewhere."""
    return LiveView(console, num_iterations) if console.is_terminal else LineView(console, num_iterations)


def event_line(type: str, payload: Mapping[str, Any]) -> str | None:
    """A line for events that people want to read; None for the others. The api tells more of them than a journal."""
    if type == "checkpoint" and payload.get("change"):
        if payload["change"] == "removed":  # a matter of course; the run's history has it with the reason
            return None
        why = f": {payload['status_detail']}" if payload.get("status_detail") else ""
        return f"checkpoint {payload.get('path', '')} {payload['change']}{why}"
    if type == "state":
        reason = payload.get("reason_code")
        return f"{payload.get('from') or 'new'} → {payload.get('to')}" + (f" ({reason})" if reason else "")
    return journal_line(type, payload)


class OpenAlerts:
    """The alerts that are open, as a run's events have told so far."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[int, str]] = {}

    def event(self, type: str, payload: Mapping[str, Any]) -> None:
        if type == "segment":  # Going back leaves what was raised after its checkpoint.
            start = payload.get("start_iteration") or 0
            self._open = {name: raised for name, raised in self._open.items() if raised[0] <= start}
        elif type == "alert" and payload.get("status") in ("raised", "escalated"):
            self._open[str(payload.get("id"))] = (int(payload.get("iteration") or 0), alert_line(payload))
        elif type == "alert" and payload.get("status") == "cleared":
            self._open.pop(str(payload.get("id")), None)

    @property
    def lines(self) -> list[str]:
        return [line for _, line in self._open.values()]


class LineView:
    """One line an iteration, for logs and pipes."""

    def __init__(self, console: Console, num_iterations: int) -> None:
        self._console = console
        self._num_iterations = num_iterations

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def phase(self, name: str) -> None:
        return None

    def event(self, type: str, iteration: int | None, payload: Mapping[str, Any]) -> None:
        if type == "metrics":
            self.say(f"iteration {iteration}/{self._num_iterations}: {metrics_line(payload)}")
        elif line := event_line(type, payload):
            self.say(line)

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class LiveView:
    """A bar over all iterations, the phase, and the main metrics with the value they began with."""

    def __init__(self, console: Console, num_iterations: int) -> None:
        self._console = console
        self._first: dict[str, float] = {}
        self._latest: dict[str, float] = {}
        self._alerts = OpenAlerts()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("waiting", total=num_iterations)
        self._live = Live(self._picture(), console=console, refresh_per_second=4, transient=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def phase(self, name: str) -> None:
        self._progress.update(self._task, description=name)

    def event(self, type: str, iteration: int | None, payload: Mapping[str, Any]) -> None:
        self._alerts.event(type, payload)
        if type == "phase":
            self.phase(str(payload.get("phase", "")))
        elif type == "metrics":
            for name in MAIN_METRICS:
                if isinstance(payload.get(name), int | float):
                    self._first.setdefault(name, payload[name])
                    self._latest[name] = payload[name]
            self._progress.update(self._task, completed=iteration or 0)
            self._live.update(self._picture())
        elif line := event_line(type, payload):
            self._live.update(self._picture())
            self.say(line)

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False)

    def _picture(self) -> Group:
        table = Table(box=None, pad_edge=False)
        table.add_column("metric")
        table.add_column("first", justify="right")
        table.add_column("now", justify="right")
        for name in MAIN_METRICS:
            if name in self._latest:
                table.add_row(name, number(self._first[name]), number(self._latest[name]))
        return Group(self._progress, table, *(Text(line) for line in self._alerts.lines))
