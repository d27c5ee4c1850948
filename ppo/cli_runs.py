"""Commands about the runs of a platform: submit, ls, get, watch, wait, stop, kill.

Ctrl-C ends the command and never the run.
"""

from __future__ import annotations

import json as json_module
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Annotated, NoReturn

import typer

from ppo import exits, show, watching
from ppo.access import Access, find_access
from ppo.cli_options import Json, Overrides, RunId, SpecFile
from ppo.client import Client, RefusedError
from ppo.exits import Exit
from ppo.fail_on import FailOn, code_with
from ppo.finding import find_run
from ppo.spec_file import read_spec_file, told_how_to_prepare
from ppo.wire import TERMINAL, Command, Run
from ppo_core.spec import parse_spec
from ppo_core.spec.advice import warnings_of


@contextmanager
def platform(json: bool) -> Iterator[tuple[Client, Access]]:
    """A client of the platform that is found, with errors turned into words and exit codes."""
    with show.errors(json):
        access = find_access()
        with Client(access.url, access.key) as client:
            yield client, access


def _page(access: Access, run_id: str) -> str:
    return f"{access.url}/runs/{run_id}"


FailOnOption = Annotated[
    list[str] | None,
    typer.Option(
        "--fail-on",
        metavar="WHAT",
        help="alert:critical or alert:warning (or worse): exit code 4 as soon as there is one; the run goes on.",
        show_default=False,
    ),
]


def submit(
    spec: SpecFile,
    set_: Overrides = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Show the run until it has ended, and leave with its exit code.")
    ] = False,
    fail_on: FailOnOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check it and say what it means; queue nothing.")] = False,
    json: Json = False,
) -> None:
    """Queue a run of SPEC. Relative paths in it count from its own folder."""
    unwanted = FailOn(fail_on)
    if fail_on and not wait:
        raise typer.BadParameter("it needs --wait: nobody would see it", param_hint="--fail-on")
    with show.errors(json):
        fields = read_spec_file(spec, set_ or [])  # What is no spec at all is told without a platform.
    with platform(json) as (client, access):
        if dry_run:
            with told_how_to_prepare(spec, fields):
                answer = client.dry_run(fields)
            if json:
                show.as_json(answer)
            else:
                filled = answer["from_alert_rules"]
                told = [f"from the platform's alert rules: {', '.join(filled)}"] if filled else []
                show.dry_run([*answer["meaning"], *told], answer["warnings"], "nothing was queued")
            return
        with told_how_to_prepare(spec, fields):
            run = client.submit(fields)
        for warning in warnings_of(parse_spec(fields)):
            show.line(f"warning: {warning}", show.err)
        page = _page(access, run["id"])
        if not wait:
            if json:
                show.as_json({**run, "url": page})
            else:
                show.line(f"{run['id']} is {run['state']}: {page}")
            return
        show.line(f"{run['id']} is {run['state']}: {page}", show.err if json else show.out)
        if json:
            _wait(client, run["id"], unwanted=unwanted)
        else:
            _watch(client, run, unwanted)
        _end(client, run["id"], page, json, unwanted)


def ls(
    state: Annotated[
        list[str] | None, typer.Option(help="Only runs in this state; may be repeated.", show_default=False)
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 50,
    json: Json = False,
) -> None:
    """List runs, newest first.

    Into a pipe or file: one run a line, fields between tabs, no heading: id, name, state, reason, health, iteration,
    score, KL, created.
    """
    with platform(json) as (client, _):
        runs = list(islice(client.runs(states=state or []), limit))
        if json:
            show.as_json(runs)
        elif not show.out.is_terminal:
            show.run_lines(runs)
        elif runs:
            show.run_table(runs)
        else:
            show.line("no runs")


def get(run: RunId, json: Json = False) -> None:
    """Show how a run stands."""
    with platform(json) as (client, access):
        found = find_run(client, run)
        if json:
            show.as_json(found)
        else:
            show.run_page(found, _page(access, found["id"]))


def watch(run: RunId, json: Json = False) -> None:
    """Show a run live until it ends, and leave with its exit code. With --json: one event a line."""
    with platform(json) as (client, access):
        found = find_run(client, run)
        run_id = found["id"]
        if not json:
            _watch(client, found)
            _end(client, run_id, _page(access, run_id), json)
        try:
            for event in watching.events_until_over(client, run_id):
                print(json_module.dumps(event, ensure_ascii=False), flush=True)
        except KeyboardInterrupt:
            raise _detached(run_id) from None
        raise _leave(client.run(run_id))


def wait(
    run: RunId,
    timeout: Annotated[
        float | None, typer.Option(min=0, help="Seconds; exit code 5 when they are over.", show_default=False)
    ] = None,
    fail_on: FailOnOption = None,
    json: Json = False,
) -> None:
    """Wait until a run has ended, and leave with its exit code (see `ppo --help`)."""
    unwanted = FailOn(fail_on)
    with platform(json) as (client, access):
        run_id = find_run(client, run)["id"]
        _wait(client, run_id, timeout, unwanted)
        _end(client, run_id, _page(access, run_id), json, unwanted)


def stop(
    run: RunId,
    wait: Annotated[
        bool, typer.Option("--wait", help="Until it has ended, and leave with its exit code: 3 when it was stopped.")
    ] = False,
    json: Json = False,
) -> None:
    """Ask a run to stop with a checkpoint. One that is over already is no error: exit code 0, and --json gives it."""
    _bring_to_end(Client.stop, run, wait, json)


def kill(
    run: RunId,
    wait: Annotated[
        bool, typer.Option("--wait", help="Until it has ended, and leave with its exit code: 3 when it was killed.")
    ] = False,
    json: Json = False,
) -> None:
    """End a run's processes at once, without a checkpoint. One that is over already is no error, as for `ppo stop`.

    What it had not saved is lost; `ppo retry` goes on from its newest checkpoint, or from the beginning without one.
    """
    _bring_to_end(Client.kill, run, wait, json)


def _bring_to_end(ask: Callable[[Client, str], Command], run: str, wait: bool, json: bool) -> None:
    with platform(json) as (client, access):
        run_id = find_run(client, run)["id"]
        page = _page(access, run_id)
        try:
            command = ask(client, run_id)
        except RefusedError as refusal:
            found = client.run(run_id)
            if found["state"] not in TERMINAL:
                raise
            if wait:
                _end(client, run_id, page, json)
            if json:
                show.as_json({**found, "url": page})
            else:
                show.line(refusal.detail)
            return
        if not wait:
            if json:
                show.as_json(command)
            else:
                show.command(command)
            return
        _wait(client, run_id)
        _end(client, run_id, page, json)


def _is_over(run: Run) -> bool:
    return exits.is_over(run["state"], run["reason_code"])


def _leave(run: Run) -> typer.Exit:
    return typer.Exit(int(exits.of_ended(run["state"], run["reason_code"])))


_NOTHING = FailOn(None)


def _wait(client: Client, run_id: str, timeout_s: float | None = None, unwanted: FailOn = _NOTHING) -> None:
    try:
        client.wait(run_id, timeout_s=timeout_s, until=lambda run: _is_over(run) or unwanted.trips(client, run))
    except KeyboardInterrupt:
        raise _detached(run_id) from None


def _watch(client: Client, run: Run, unwanted: FailOn = _NOTHING) -> None:
    try:
        watching.watch(client, run, show.out, lambda: unwanted.trips(client, client.run(run["id"])))
    except KeyboardInterrupt:
        raise _detached(run["id"]) from None


def _end(client: Client, run_id: str, page: str, json: bool, unwanted: FailOn = _NOTHING) -> NoReturn:
    """Say how a run stands and leave with its exit code, or with that of what nobody wanted to see."""
    run = client.run(run_id)
    alerts = unwanted.alerts(client, run_id)
    if json:
        show.as_json({**run, "url": page, **({"failed_on": alerts} if alerts else {})})
    else:
        show.run_page(run, page)
    for alert in alerts:
        show.line(f"--fail-on: {alert['severity']} alert: {alert['title']}  ({alert['id']})", show.err)
    if not _is_over(run):
        show.line(f"the run goes on: ppo stop {run_id} ends it", show.err)
        raise typer.Exit(int(Exit.TRIPPED))
    raise typer.Exit(int(code_with(alerts, exits.of_ended(run["state"], run["reason_code"]))))


def _detached(run_id: str) -> typer.Exit:
    show.line(f"detached; the run goes on: ppo watch {run_id}", show.err)
    return typer.Exit(int(Exit.DETACHED))


def register(app: typer.Typer) -> None:
    """Add these commands to the `ppo` command."""
    for function in (submit, ls, get, watch, wait, stop, kill):
        app.command()(function)
