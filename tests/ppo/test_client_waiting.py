"""A wait sits out a service that is away for a while, and no longer; what is refused is not asked again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ppo import client_waiting
from ppo.client_errors import NotFoundError, RequestError, UnreachableError, WaitTimeoutError
from ppo.client_waiting import follow, has_ended, wait, wait_command
from ppo.connection import PAGE

UNREACHABLE = UnreachableError("no answer")
AWAY = RequestError(503, {})
STOPPED = {"type": "state", "seq": 2, "payload": {"to": "stopped"}}


class Service:
    """Fails with `faults` one question after the other, then answers: the run has stopped, the command is done."""

    def __init__(self, faults: Iterator[Exception]) -> None:
        self._faults = faults

    def _answer(self, answer: dict[str, Any]) -> Any:
        fault = next(self._faults, None)
        if fault is not None:
            raise fault
        return answer

    def run(self, run_id: str) -> Any:
        return self._answer({"state": "stopped", "event_seq": 2})

    def command(self, run_id: str, command_id: str) -> Any:
        return self._answer({"finished_at": "2030-01-01T00:00:00Z", "kind": "stop", "status": "done"})

    def events(self, run_id: str, *, after: int = 0, wait_s: float = 0, limit: int = PAGE) -> Any:
        return self._answer({"items": [STOPPED] if after < 2 else []})


WAITS: dict[str, Callable[[Service], object]] = {
    "events": lambda service: list(follow(service, "r-1", 0, client_waiting.PATIENCE_S)),
    "a run": lambda service: wait(service, "r-1", None, has_ended),
    "a command": lambda service: wait_command(service, "r-1", "c-1", None),
}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_waiting, "ASK_EVERY_S", 0.0)


@pytest.mark.parametrize("kind", WAITS)
@pytest.mark.parametrize("fault", [UNREACHABLE, AWAY])
def test_a_service_that_comes_back_is_waited_for(kind: str, fault: Exception) -> None:
    undisturbed = WAITS[kind](Service(iter(())))
    assert WAITS[kind](Service(iter([fault] * 3))) == undisturbed


@pytest.mark.parametrize("kind", WAITS)
@pytest.mark.parametrize("fault", [UNREACHABLE, AWAY])
def test_one_that_stays_away_is_given_up(kind: str, fault: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_waiting, "PATIENCE_S", 0.05)
    with pytest.raises(type(fault)):
        WAITS[kind](Service(iter(lambda: fault, None)))


@pytest.mark.parametrize("kind", WAITS)
def test_a_refusal_is_none_that_is_waited_out(kind: str) -> None:
    with pytest.raises(NotFoundError):
        WAITS[kind](Service(iter([NotFoundError(404, {})])))


def test_a_wait_that_is_over_says_how_the_run_stands() -> None:
    with pytest.raises(WaitTimeoutError, match="r-1 is stopped after 0 s"):
        wait(Service(iter(())), "r-1", 0, lambda _: False)
