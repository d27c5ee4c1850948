"""Seconds per phase of an iteration, and a word to whoever follows when a phase begins."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


class Stopwatch:
    """Measures named phases; `announce` is called as each begins."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        self._announce = announce
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._announce(name)
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase so far, and of the `iteration` as a whole."""
        return {**self._seconds, "iteration": time.perf_counter() - self._started}
