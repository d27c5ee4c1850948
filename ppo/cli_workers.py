"""`ppo workers`: the machines that runs can be on, what they do, and whether they take runs."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from ppo import show
from ppo.cli_options import Json
from ppo.cli_runs import platform
from ppo.wire import Slot, Worker

WorkerId = Annotated[str, typer.Argument(metavar="WORKER", help="A worker's id.", show_default=False)]

commands = typer.Typer(help="List the workers: ppo workers. Or drain one, or enable it again.")


@commands.callback(invoke_without_command=True)
def ls(context: typer.Context, json: Json = False) -> None:
    """List the workers with their slots and the runs that hold them. Or drain one, or enable it again.

    Into a pipe or file: one worker a line, fields between tabs, no heading: id, host, state, busy slots, CPU slots,
    GPUs, seconds since its last sign of life, version.
    """
    if context.invoked_subcommand is not None:
        return
    with platform(json) as (client, _):
        found = client.workers()
        if json:
            show.as_json(found)
        elif not show.out.is_terminal:
            for worker in found:
                slots = (worker["busy_slots"], worker["cpu_slots"], worker["gpus"])
                silent = f"{worker['silent_s']:.0f}"
                print(worker["id"], worker["host"], worker["state"], *slots, silent, worker["version"], sep="\t")
        elif found:
            _table(found)
        else:
            show.line("no workers")


@commands.command()
def drain(worker: WorkerId, json: Json = False) -> None:
    """Have a worker take no more runs. Those it has save and go back into the queue, until it is enabled again."""
    with platform(json) as (client, _):
        _tell(client.drain(worker), json)


@commands.command()
def enable(worker: WorkerId, json: Json = False) -> None:
    """Let a drained worker take runs again."""
    with platform(json) as (client, _):
        _tell(client.enable(worker), json)


def _tell(worker: Worker, json: bool) -> None:
    if json:
        show.as_json(worker)
    elif worker["state"] == "draining" and (held := worker["busy_slots"]):
        slots = "1 of its slots is" if held == 1 else f"{held} of its slots are"
        show.line(f"{worker['id']} is draining; {slots} still held: ppo workers")
    else:
        show.line(f"{worker['id']} is {worker['state']}")


def _table(found: list[Worker]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for heading in ("worker", "state", "heard", "slots"):
        table.add_column(heading, no_wrap=heading != "slots")
    for worker in found:
        state = worker["state"] if worker["data_shared"] else f"{worker['state']} [another data folder]"
        if worker["folder_fault"] is not None:
            state = f"{worker['state']} [takes no run]"
        heard = f"{worker['silent_s']:.0f} s ago"
        slots = "\n".join(_slot(slot) for slot in worker["slots"]) or "none"
        table.add_row(show.plain(worker["id"]), state, heard, show.plain(slots))
    show.out.print(table)
    for worker in found:
        if worker["folder_fault"] is not None:
            show.line(f"{worker['id']} takes no run: {worker['folder_fault']}")


def _slot(slot: Slot) -> str:
    device = f" {slot['device']}" if slot["device"] else ""
    holder = "free" if slot["run_id"] is None else f"{slot['run_name']} ({slot['run_id']}, {slot['run_state']})"
    return f"{slot['kind'].upper()} {slot['index']}{device}: {holder}"


def register(app: typer.Typer) -> None:
    """Add `workers` to the `ppo` command."""
    app.add_typer(commands, name="workers")
