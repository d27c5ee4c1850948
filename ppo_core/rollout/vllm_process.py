"""One vLLM process as the trainer sees it: started, asked, watched, and ended.

It never outlives the trainer. That it died is noticed within a second, with what it died of and the end of its log;
that it is silent, by the deadline. It knows processes and messages, no tokens and no weights.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppo_core.errors import EngineLostError, EngineTimeoutError
from ppo_core.rollout.vllm_channel import Channel, ChannelClosed, Message
from ppo_core.rollout.vllm_replica import POLL_S, answered

# A process whose connection broke is about to end; only one that hangs while it ends takes longer.
LEAVING_S = 5.0
LOG_LINES = 15


class VLLMProcess:
    """`name` is what errors call it; `log` is the file that it prints to.

    Args:
        name: for people, such as "vLLM engine 0".
        log: created, or added to.
        environment: of the process, whole.
        timeout_s: longest silence while something is asked, seconds; it says that it goes on once a second.
    """

    def __init__(self, name: str, log: Path, environment: Mapping[str, str], timeout_s: float) -> None:
        self.name = name
        self._log = log
        self._timeout_s = timeout_s
        self._patience_s = timeout_s
        self._next_call = 0
        self._open: set[int] = set()
        self._has_ended = False
        self._heard = time.monotonic()
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "ppo_core.rollout.vllm_server", str(theirs.fileno()), str(os.getpid())]
        with theirs, log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env=dict(environment),
                process_group=0,  # so that whatever it starts is ended with it
            )
        self._channel = Channel(ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, operation: str, *, timeout_s: float | None = None, **arguments: Any) -> int:
        """Send a request; returns the number that its answer carries. `timeout_s` is for this one, if given."""
        self._next_call += 1
        self._patience_s = timeout_s or self._timeout_s
        self._open.add(self._next_call)
        self._heard = time.monotonic()
        self._channel.post({"call": self._next_call, "operation": operation, **arguments})
        return self._next_call

    def abort(self, call: int, timeout_s: float) -> None:
        """Give up a request and wait until the process has.

        Raises:
            EngineLostError, EngineTimeoutError: it is gone, or did not say so within `timeout_s` and was killed.
        """
        if call not in self._open:
            return
        self._channel.post({"operation": "abort"})
        self._heard, self._patience_s = time.monotonic(), timeout_s
        while self.answer(call, POLL_S) is None:
            pass

    def answer(self, call: int, wait_s: float) -> Message | None:
        """The answer to a request, or None if none has come within `wait_s` seconds.

        Raises:
            EngineLostError: the process is gone.
            EngineTimeoutError: it has been silent for too long; it was killed.
            WeightSyncError: it refuses since it does not hold the weights that it should.
            RolloutError: it could not do what it was asked.
        """
        if self._has_ended:
            raise EngineLostError(f"{self.name} (process {self.pid}) has ended before")
        try:
            messages = self._channel.exchange(wait_s)
        except ChannelClosed:
            raise self._lost() from None
        for message in messages:
            self._heard = time.monotonic()
            if message["call"] == call and "progress" not in message:
                self._open.discard(call)
                return answered(self.name, message)
        if not messages:
            if self._process.poll() is not None:
                raise self._lost()
            silent_s = time.monotonic() - self._heard
            if silent_s > self._patience_s:
                self.kill()
                raise EngineTimeoutError(
                    f"{self.name} (process {self.pid}) did not answer within {self._patience_s:g} s and was killed; "
                    f"the end of its log {self._log}:\n{self._log_tail()}"
                )
        return None

    def kill(self) -> None:
        """End it and all that it started, at once; harmless when repeated."""
        if self._has_ended:
            return  # Its number may be another's by now.
        self._has_ended = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._channel.close()

    def _lost(self) -> EngineLostError:
        try:
            code = self._process.wait(LEAVING_S)
            end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
        except subprocess.TimeoutExpired:
            end = "closed its connection and was killed"
        self.kill()
        return EngineLostError(
            f"{self.name} (process {self.pid}) {end}; the end of its log {self._log}:\n{self._log_tail()}"
        )

    def _log_tail(self) -> str:
        with contextlib.suppress(OSError):
            return "\n".join(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:])
        return "(none)"
