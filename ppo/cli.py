"""The `ppo` command. Commands about runs of a platform are in `cli_runs`; here are those that start something."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ppo import (
    cli_alerts,
    cli_checkpoints,
    cli_gates,
    cli_going_back,
    cli_logs,
    cli_records,
    cli_runs,
    cli_workers,
    show,
    streams,
)
from ppo.access import DEFAULT_FOLDER, data_folder
from ppo.cli_options import Json, Overrides, SpecFile
from ppo.exits import CODES, Exit

app = typer.Typer(
    name="ppo",
    help="Train language models with PPO: submit runs, watch them, stop them.",
    epilog=f"Exit codes: {CODES}",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
cli_runs.register(app)
cli_going_back.register(app)
cli_checkpoints.register(app)
cli_alerts.register(app)
cli_gates.register(app)
cli_logs.register(app)
cli_records.register(app)
cli_workers.register(app)


@app.command()
def train(
    spec: SpecFile,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder for the run, new or empty. Default: runs/NAME-TIME.", show_default=False)
    ] = None,
    set_: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --run-dir.")] = False,
    rollback: Annotated[
        str | None,
        typer.Option(
            metavar="[SEGMENT:]ITERATION",
            help="Go back to a checkpoint of the run in --run-dir; --set may change what a roll back may.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check it and say what it means and needs; start nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Run SPEC in this terminal, with no platform. Ctrl-C stops it with a checkpoint.

    Its exit code is that of every command. The end of its journal has the trainer's own code, which becomes it so:
    0 → 0 · 10 paused, 11 stopped, 75 drained → 3 · 69 gate or guard → 4 · 64 bad spec → 2 · all others → 1.
    """
    from ppo import train as training

    with show.errors(json):
        if dry_run:
            found = training.what_it_means(spec, set_ or [])
            if json:
                show.as_json(found.as_dict())
            else:
                show.dry_run(found.news, found.warnings, "nothing was started")
            return
        attempt = training.prepare(spec, set_ or [], run_dir, resume, rollback)
        if attempt is None:
            show.line(f"the run in {run_dir} has reached its end already", show.err)
            return
        raise typer.Exit(int(training.train(attempt, show.out, json)))


@app.command()
def up(
    data: Annotated[
        Path | None,
        typer.Option(help="Data folder. Default: $PPO_HOME, else .ppo-control here.", show_default=False),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of pages and API; when taken, the next free one.")
    ] = 8600,
    root: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder that specs may name files under; may be repeated. Default: here.", show_default=False
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Start the whole platform on this machine, for this machine. Ctrl-C stops it; the data stay."""
    from ppo.local.processes import StackError
    from ppo.local.stack import Stack
    from ppo.local.up import make_stack, serve

    console = Console(stderr=json)

    def report(line: str) -> None:
        show.line(line, console)

    def ready(stack: Stack) -> None:
        link = stack.login_link()
        if json:
            show.as_json({"url": stack.url, "login_link": link, "data": str(stack.data)})
            return
        for text in banner(stack.url, link, stack.data):
            report(text)

    try:
        serve(make_stack(data or data_folder(), port, root or [], report), ready)
    except StackError as error:
        show.line(f"error: {error}", show.err)
        raise typer.Exit(int(Exit.FAILED)) from error
    report("stopped")


def banner(url: str, link: str, data: Path) -> list[str]:
    """What is said once the platform runs; in a folder that other commands would not look in, how they find it."""
    lines = ["", f"PPO Control runs at {url}", f"sign in once with   {link}", f"data                {data}"]
    if data != Path(DEFAULT_FOLDER).resolve():
        lines.append(f"for other commands  export PPO_HOME={shlex.quote(str(data))}")
    return [*lines, "Ctrl-C stops it; running runs save and go on at the next start"]


def main() -> None:
    """Entry point of the `ppo` command."""
    with streams.leaving_with_the_reader():
        app()


if __name__ == "__main__":
    main()
