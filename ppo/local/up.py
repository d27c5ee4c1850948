"""`ppo up` without its command line: the stack, until a signal or a failure ends it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from ppo.local.processes import StackError
from ppo.local.stack import Stack


class Asked(BaseException):
    """A signal asked for the end; like KeyboardInterrupt, no `except Exception` may swallow it."""


@contextmanager
def ending_on_signals(stack: Stack) -> Iterator[None]:
    """In here the first signal raises `Asked`, later ones end the waiting of a stop under way."""
    asked = False

    def on_signal(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked or stack.stopping:
            stack.hurry.set()
            return
        asked = True
        raise Asked

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def make_stack(data: Path, port: int, roots: Sequence[Path], report: Callable[[str], None]) -> Stack:
    """A stack as the environment wants it: DATABASE_URL and REDIS_URL, where given, stand in for embedded servers."""
    return Stack(
        data,
        port=port,
        roots=roots,
        database_url=os.environ.get("DATABASE_URL") or None,
        redis_url=os.environ.get("REDIS_URL") or None,
        report=report,
    )


def serve(stack: Stack, on_ready: Callable[[Stack], None]) -> None:
    """Start, call `on_ready`, and stay until a signal.

    Raises:
        StackError: it could not start, or a part of it could not be kept running.
    """
    with ending_on_signals(stack):
        try:
            with stack:
                on_ready(stack)
                wait_for_failure(stack.keeper.failed)
                raise StackError(stack.keeper.failure or "a part of the platform failed")
        except Asked:
            return


def wait_for_failure(failed: threading.Event) -> None:
    """Wait in short steps, so that a signal is noticed at once on every platform."""
    while not failed.wait(0.5):
        pass
