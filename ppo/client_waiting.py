"""Waiting for what happens on a platform that may be away meanwhile: a run's events, its end, a command's outcome."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol, TypeVar

from ppo.client_errors import RequestError, UnreachableError, WaitTimeoutError
from ppo.connection import COMES_AND_GOES, PAGE
from ppo.wire import TERMINAL, Command, Event, EventPage, Run, RunDetail

T = TypeVar("T")

LONGEST_POLL_S = 25.0
PATIENCE_S = 120.0  # How long a service that does not answer is sat out.
ASK_EVERY_S = 1.0


class Reader(Protocol):
    """What of a `ppo.Client` is asked here."""

    def run(self, run_id: str) -> RunDetail: ...
    def command(self, run_id: str, command_id: str) -> Command: ...
    def events(self, run_id: str, *, after: int = 0, wait_s: float = 0, limit: int = PAGE) -> EventPage: ...


def has_ended(run: Run) -> bool:
    """Whether only a user's retry or roll back could make it go on."""
    return run["state"] in TERMINAL


def follow(client: Reader, run_id: str, after: int, patience_s: float) -> Iterator[Event]:
    """A run's events behind `after` in order, each once, until the run ends.

    Raises:
        UnreachableError, RequestError: the platform did not answer for `patience_s`.
    """
    while True:
        page = _patiently(partial(client.events, run_id, after=after, wait_s=LONGEST_POLL_S), patience_s)
        for event in page["items"]:
            after = event["seq"]
            yield event
        if not page["items"] or _may_end(page["items"][-1]):
            run = _patiently(partial(client.run, run_id), patience_s)
            if has_ended(run) and run["event_seq"] <= after:
                return


def wait(client: Reader, run_id: str, timeout_s: float | None, until: Callable[[RunDetail], bool]) -> RunDetail:
    """The run once `until` it; see `Client.wait`."""
    deadline = _Deadline(timeout_s)
    while True:
        run = _patiently(partial(client.run, run_id), PATIENCE_S, deadline)
        if _patiently(partial(until, run), PATIENCE_S, deadline):
            return run
        if deadline.left_s() <= 0:
            raise WaitTimeoutError(f"run {run_id} is {run['state']} after {timeout_s:g} s; it goes on")
        _sleep_until_news(client, run_id, run["event_seq"], deadline)


def wait_command(client: Reader, run_id: str, command_id: str, timeout_s: float | None) -> Command:
    """A command once it has its outcome; see `Client.wait_command`."""
    deadline = _Deadline(timeout_s)
    while True:
        # The position is read first, so that what happens meanwhile ends the wait below.
        seen = _patiently(partial(client.run, run_id), PATIENCE_S, deadline)["event_seq"]
        command = _patiently(partial(client.command, run_id, command_id), PATIENCE_S, deadline)
        if command["finished_at"] is not None:
            return command
        if deadline.left_s() <= 0:
            raise WaitTimeoutError(f"{command['kind']} {command_id} is {command['status']} after {timeout_s:g} s")
        _sleep_until_news(client, run_id, seen, deadline)


class _Deadline:
    """When a wait is over, if ever."""

    def __init__(self, timeout_s: float | None) -> None:
        self._at = None if timeout_s is None else time.monotonic() + timeout_s

    def left_s(self) -> float:
        return LONGEST_POLL_S if self._at is None else self._at - time.monotonic()


def _sleep_until_news(client: Reader, run_id: str, seen: int, deadline: _Deadline) -> None:
    wait_s = max(0.0, min(deadline.left_s(), LONGEST_POLL_S))
    _patiently(partial(client.events, run_id, after=seen, wait_s=wait_s, limit=1), PATIENCE_S, deadline)


def _patiently(ask: Callable[[], T], patience_s: float, deadline: _Deadline | None = None) -> T:
    """The answer of a service that may restart meanwhile.

    Raises:
        UnreachableError, RequestError: it gave none for `patience_s`, or until the deadline; or it refused.
    """
    away_since: float | None = None
    while True:
        try:
            return ask()
        except (UnreachableError, RequestError) as error:
            if isinstance(error, RequestError) and error.status not in COMES_AND_GOES:
                raise
            away_since = away_since or time.monotonic()
            if time.monotonic() - away_since >= patience_s or (deadline is not None and deadline.left_s() <= 0):
                raise
        time.sleep(min(ASK_EVERY_S, patience_s))


def _may_end(event: Event) -> bool:
    return event["type"] == "command" or (event["type"] == "state" and event["payload"].get("to") in TERMINAL)
