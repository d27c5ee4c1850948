"""Standard output and error of a command whose reader may leave before it is done: `ppo ls | head -1`.

It leaves quietly with 141, as a program does that the shell reports ended by SIGPIPE. The signal itself stays ignored:
it would also end a command whose connection to the platform breaks, and `ppo up` without stopping its parts.
"""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from ppo.exits import Exit


class ReaderGone(SystemExit):
    """Nobody reads the output any longer. No `OSError`, which rich and typer would turn into exit code 1."""

    def __init__(self) -> None:
        super().__init__(int(Exit.READER_GONE))


class _Leaving(io.TextIOWrapper):
    """A text stream that ends the command once its reader has gone; what is written afterwards is dropped."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except BrokenPipeError:
            self._leave()
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except BrokenPipeError:
            self._leave()

    def _leave(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        # SystemExit ends only the thread that it is raised in: another one goes on and is not heard.
        if threading.current_thread() is threading.main_thread():
            raise ReaderGone


@contextmanager
def leaving_with_the_reader() -> Iterator[None]:
    """In here, writing to a closed pipe ends the process with 141, whatever it was doing; at the end all is written."""
    sys.stdout = _leaving(sys.stdout)
    sys.stderr = _leaving(sys.stderr)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # None: closed at the start.
                stream.flush()


def _leaving(stream: TextIO) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper):  # None, or somebody's own.
        return stream
    encoding, errors, lines = stream.encoding, stream.errors, stream.line_buffering
    return _Leaving(stream.detach(), encoding, errors, line_buffering=lines)
