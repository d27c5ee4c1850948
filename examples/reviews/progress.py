"""Waits that show themselves: a bar on a terminal, a plain line every few seconds elsewhere."""

import time
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_EVERY_S = 10.0


class Wait(Protocol):
    """What a stage reports to while it works."""

    def start(self, total: int) -> None:
        """The amount of work is known."""

    def at(self, done: int) -> None:
        """Work already done, at a start or a resume."""

    def advance(self, count: int, note: str = "") -> None:
        """More work is done; the note is shown beside the bar."""


class BarWait:
    """A rich progress bar; it pulses until the amount of work is known."""

    def __init__(self, console: Console, title: str) -> None:
        self._bar = Progress(
            TextColumn("{task.description:<34}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
        )
        self._task = self._bar.add_task(title, total=None, note="")

    def __enter__(self) -> "BarWait":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            total = self._bar.tasks[0].total or 1
            self._bar.update(self._task, total=total, completed=total)
        self._bar.stop()

    def start(self, total: int) -> None:
        self._bar.update(self._task, total=total)

    def at(self, done: int) -> None:
        self._bar.update(self._task, completed=done)

    def advance(self, count: int, note: str = "") -> None:
        self._bar.update(self._task, advance=count, note=note)


class LineWait:
    """A line at the start, at the end, and about every ten seconds between."""

    def __init__(self, console: Console, title: str) -> None:
        self._console, self._title = console, title
        self._total, self._done = 0, 0
        self._began = self._last_line = time.monotonic()

    def __enter__(self) -> "LineWait":
        self._print(f"{self._title} ...")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._print(f"{self._title}: done in {time.monotonic() - self._began:.0f} s")

    def start(self, total: int) -> None:
        self._total = total

    def at(self, done: int) -> None:
        self._done = done

    def advance(self, count: int, note: str = "") -> None:
        self._done += count
        now = time.monotonic()
        if self._total and now - self._last_line >= LINE_EVERY_S:
            self._last_line = now
            self._print(f"{self._title}: {100 * self._done // self._total} %{', ' + note if note else ''}")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def wait_on(console: Console, title: str) -> BarWait | LineWait:
    """The kind of wait that fits where the console writes to."""
    return BarWait(console, title) if console.is_terminal else LineWait(console, title)
