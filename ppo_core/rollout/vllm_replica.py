"""One of the engines among which a trainer deals rows out, wherever it runs: what can be asked of it, and waiting.

It knows neither processes nor connections.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ppo_core.errors import RolloutError, WeightSyncError

Message = dict[str, Any]

POLL_S = 0.02


class Replica(Protocol):
    """Requests are numbered; each has one answer. Whatever it is silent about for too long is an error."""

    name: str  #: what errors call it

    def ask(self, operation: str, *, timeout_s: float | None = None, **arguments: Any) -> int:
        """Send a request; returns the number that its answer carries. `timeout_s` is for this one, if given."""
        ...

    def answer(self, call: int, wait_s: float) -> Message | None:
        """The answer to a request, or None if none has come within `wait_s` seconds.

        Raises:
            EngineLostError: it is gone.
            EngineTimeoutError: it has been silent for too long.
            WeightSyncError: it refuses since it does not hold the weights that it should.
            RolloutError: it could not do what it was asked.
        """
        ...

    def abort(self, call: int, timeout_s: float) -> None:
        """Give up a request and wait until it has.

        Raises:
            EngineLostError, EngineTimeoutError: it is gone, or did not say so within `timeout_s`.
        """
        ...

    def kill(self) -> None:
        """End it, as far as it is the trainer's own; harmless when repeated."""
        ...


def answers(calls: Sequence[tuple[Replica, int]], check: Callable[[], None] | None = None) -> list[Message]:
    """Wait for one answer of each replica, calling `check` all the while; what that raises is raised.

    Raises:
        RolloutError: as `Replica.answer`, of the first one that fails.
    """
    found: dict[int, Message] = {}
    while len(found) < len(calls):
        for place, (replica, call) in enumerate(calls):
            if check is not None:
                check()
            if place not in found:
                message = replica.answer(call, POLL_S / len(calls))
                if message is not None:
                    found[place] = message
    return [found[place] for place in range(len(calls))]


def answered(name: str, message: Message) -> Message:
    """An answer, or the error that it tells of."""
    match message.get("error"):
        case None:
            return message
        case "weights":
            raise WeightSyncError(f"{name}: {message['message']}")
        case _:
            raise RolloutError(f"{name}: {message['message']}", hint="The engine's own log has its traceback.")
