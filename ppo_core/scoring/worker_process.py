"""One scoring process as its owner sees it: a request at a time, answers as lines, no call that can block."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from typing import IO, Any


class WorkerProcess:
    """`row` is what it works on, None while it starts or waits; `has_ended` once its answers have come to an end.

    One that ends without ever being ready could not start; `failure` then says why. One that is ready has said what its
    function's `content` is, as far as it can be told.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._requests, self._answers = _pipe(process.stdin), _pipe(process.stdout)
        self._outgoing = self._incoming = b""
        self._since = time.monotonic()
        self.row: int | None = None
        self.was_ready = False
        self.content: str | None = None
        self.failure = "its process ended while starting"
        self.has_ended = False

    @property
    def is_idle(self) -> bool:
        return self.was_ready and self.row is None and not self.has_ended

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def is_late(self, patience: float) -> bool:
        """Whether it has been at its present call, or at its start, for longer than `patience` seconds."""
        return not self.is_idle and time.monotonic() - self._since > patience

    def send(self, row: int, prompt: str, response: str) -> None:
        # Escaped to ASCII: lone surrogates go through, too.
        self._outgoing = json.dumps({"row": row, "prompt": prompt, "response": response}).encode("ascii") + b"\n"
        self.row, self._since = row, time.monotonic()
        self.write()

    def write(self) -> None:
        """Write what the pipe takes; the rest goes when the selector says so."""
        try:
            self._outgoing = self._outgoing[os.write(self._requests, self._outgoing) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._outgoing = b""  # It has died; the end of its answers will say so.

    def register(self, selector: selectors.BaseSelector) -> None:
        selector.register(self._answers, selectors.EVENT_READ, self)
        if self._outgoing:
            selector.register(self._requests, selectors.EVENT_WRITE, self)

    def messages(self) -> list[dict[str, Any]]:
        """Whole answers that have come in since the last call."""
        try:
            data = os.read(self._answers, 1 << 20)
        except BlockingIOError:
            return []
        self.has_ended = not data
        *lines, self._incoming = (self._incoming + data).split(b"\n")
        messages: list[dict[str, Any]] = [json.loads(line) for line in lines]
        for message in messages:
            self.was_ready |= "ready" in message
            self.content = message.get("content", self.content)
            self.failure = message.get("failed", self.failure)
            self.row = None
        return messages

    def end(self) -> None:
        """Kill it, wait until it is gone, and close its pipes."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


def _pipe(stream: IO[bytes] | None) -> int:
    assert stream is not None  # Both pipes were asked for.
    os.set_blocking(stream.fileno(), False)
    return stream.fileno()
