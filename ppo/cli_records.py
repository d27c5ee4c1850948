"""What is kept of runs: `ppo edit` changes a run's name, notes or place in the queue, `ppo rm` deletes it."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from ppo import show
from ppo.cli_options import Json, RunId
from ppo.cli_runs import platform
from ppo.exits import Exit
from ppo.finding import find_run


def edit(
    run: RunId,
    name: Annotated[str | None, typer.Option(help="A new name.", show_default=False)] = None,
    notes: Annotated[
        str | None, typer.Option(help="Text for people; an empty one takes it away.", show_default=False)
    ] = None,
    priority: Annotated[
        int | None, typer.Option(min=-100, max=100, help="Higher is claimed first.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Rename a run, write notes on it, or change its place in the queue."""
    given: dict[str, Any] = {"name": name, "notes": notes, "priority": priority}
    fields = {field: value for field, value in given.items() if value is not None}
    if not fields:
        raise typer.BadParameter("give --name, --notes or --priority")
    if notes == "":
        fields["notes"] = None
    with platform(json) as (client, access):
        changed = client.change(find_run(client, run)["id"], **fields)
        if json:
            show.as_json(changed)
        else:
            show.run_page(changed, f"{access.url}/runs/{changed['id']}")


def rm(
    run: RunId,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Delete a run that has ended, with its metrics, samples, checkpoints and files. It cannot be undone."""
    with platform(json) as (client, _):
        found = find_run(client, run)
        question = f"Delete {found['name']} ({found['id']}, {found['state']}) with all its checkpoints, for good?"
        if not yes and not _agreed(question):
            raise typer.Abort
        client.delete_run(found["id"], version=found["version"])
        if json:
            show.as_json({"deleted": found["id"]})
        else:
            show.line(f"{found['name']} ({found['id']}) is deleted; its files go within a minute")


def _agreed(question: str) -> bool:
    try:
        return typer.confirm(question, err=True)
    except typer.Abort:
        if sys.stdin.isatty():  # Ctrl-C, or Ctrl-D
            raise
        show.line("\nerror: there is no terminal to ask on; give --yes", show.err)
        raise typer.Exit(int(Exit.USAGE)) from None


def register(app: typer.Typer) -> None:
    """Add these commands to the `ppo` command."""
    for function in (edit, rm):
        app.command()(function)
