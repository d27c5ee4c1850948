"""`ppo logs`: what a run's processes printed, read, followed or searched."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Literal

import typer

from ppo import exits, show
from ppo.cli_options import Json, RunId
from ppo.cli_runs import platform
from ppo.client import Client
from ppo.exits import Exit
from ppo.finding import find_run

PIECE_BYTES = 256 * 1024
FOLLOW_EVERY_S = 1.0

Source = Literal["trainer", "supervisor"]


def logs(
    run: RunId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
    rank: Annotated[int, typer.Option(min=0, help="Which process of the trainer.")] = 0,
    attempt: Annotated[
        int | None, typer.Option(min=0, help="Which attempt. Default: the newest.", show_default=False)
    ] = None,
    lines: Annotated[
        int | None, typer.Option(min=1, help="Only so many of the last lines. Default: all.", show_default=False)
    ] = None,
    search: Annotated[
        str | None, typer.Option(help="Only lines that hold this, upper or lower case.", show_default=False)
    ] = None,
    supervisor: Annotated[bool, typer.Option("--supervisor", help="What looked after the trainer printed.")] = False,
    json: Json = False,
) -> None:
    """Print what a run's trainer printed.

    With --search: the match's byte position, a colon, and its line; exit code 1 when nothing is found. With --json:
    which logs there are, or with --search the matches.
    """
    if search is not None and (follow or lines):
        raise typer.BadParameter("--search reads a whole log; leave out --follow and --lines")
    if json and (follow or lines):
        raise typer.BadParameter("--json lists the logs; leave out --follow and --lines, or --json")
    source: Source = "supervisor" if supervisor else "trainer"
    with platform(json) as (client, _):
        found = find_run(client, run)
        if search is not None:
            _search(client, found["id"], search, source, found["attempt"] if attempt is None else attempt, rank, json)
        elif json:
            show.as_json(client.log_files(found["id"]))
        else:
            try:
                _print(client, found["id"], source, attempt, rank, lines, follow)
            except KeyboardInterrupt:
                raise typer.Exit(int(Exit.DETACHED)) from None


def _search(client: Client, run_id: str, text: str, source: Source, attempt: int, rank: int, json: bool) -> None:
    matches = client.search_logs(run_id, text, source=source, attempt=attempt, rank=rank)
    if json:
        show.as_json(list(matches))
        return
    any_found = False
    for match in matches:
        any_found = True
        print(f"{match['offset']}:{match['line']}", flush=True)
    if not any_found:
        raise typer.Exit(int(Exit.FAILED))


def _print(
    client: Client, run_id: str, source: Source, attempt: int | None, rank: int, lines: int | None, follow: bool
) -> None:
    """Piece by piece. Without an attempt named, following goes over to each new one."""
    number = client.run(run_id)["attempt"] if attempt is None else attempt
    offset = 0
    if lines is not None:
        text, offset = _tail(client, run_id, source, number, rank, lines)
        sys.stdout.write(text)
    while True:
        standing = client.run(run_id) if follow else None  # looked at first: what comes after its end is read below
        while True:
            piece = client.logs(run_id, source=source, attempt=number, rank=rank, offset=offset, limit=PIECE_BYTES)
            offset = piece["next_offset"]  # of a file that got shorter meanwhile: its end
            sys.stdout.write(piece["text"])
            if offset >= piece["size"]:
                break
        sys.stdout.flush()
        if standing is None:
            return
        newer = attempt is None and source == "trainer" and standing["attempt"] > number
        if newer:
            number, offset = standing["attempt"], 0
            show.line(f"== attempt {number}", show.err)
        elif exits.is_over(standing["state"], standing["reason_code"]):
            return
        else:
            time.sleep(FOLLOW_EVERY_S)


def _tail(client: Client, run_id: str, source: Source, attempt: int, rank: int, lines: int) -> tuple[str, int]:
    """The last `lines` lines, and the byte that they end before. It looks back through one piece after the other."""
    end = client.logs(run_id, source=source, attempt=attempt, rank=rank, offset=-1, limit=1)["size"]
    text, begin = "", end
    while begin > 0 and text.count("\n") <= lines:
        start = max(0, begin - PIECE_BYTES)
        piece = client.logs(run_id, source=source, attempt=attempt, rank=rank, offset=start, limit=begin - start)
        text, begin = piece["text"] + text, start
    parts = text.split("\n")
    return "\n".join(parts[-lines - 1 :] if parts[-1] == "" else parts[-lines:]), end


def register(app: typer.Typer) -> None:
    """Add `logs` to the `ppo` command."""
    app.command()(logs)
