"""Follows a run of a platform until it is over, and shows it meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.console import Console

from ppo import exits
from ppo.client import Client
from ppo.client_waiting import PATIENCE_S
from ppo.run_view import view_for
from ppo.wire import Event, Run


def _never() -> bool:
    return False


def events_until_over(
    client: Client, run_id: str, tripped: Callable[[], bool] = _never, patience_s: float = PATIENCE_S
) -> Iterator[Event]:
    """A run's events from its beginning until it has ended, or was paused by what watches it.

    `tripped` is asked after each alert, and ends it too.

    An end in the middle of its history, before a retry say, is none.
    """
    over = False
    for event in client.follow(run_id, patience_s=patience_s):
        yield event
        if event["type"] == "state":
            over = exits.is_over(event["payload"]["to"], event["payload"].get("reason_code"))
        if event["type"] == "alert" and tripped():
            return
        if over and client.run(run_id)["event_seq"] <= event["seq"]:
            return


def watch(
    client: Client,
    run: Run,
    console: Console,
    tripped: Callable[[], bool] = _never,
    patience_s: float = PATIENCE_S,
) -> None:
    """Show a run until it is over, or until `tripped`, which is asked after each alert."""
    with view_for(console, run["num_iterations"]) as view:
        view.phase(run["state"])
        for event in events_until_over(client, run["id"], tripped, patience_s):
            if event["type"] == "state":
                view.phase(event["payload"]["to"])
            view.event(event["type"], event["iteration"], event["payload"])
