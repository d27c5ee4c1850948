"""`ppo checkpoints`: what a run can go back to, what of it stays, and how it leaves the platform."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from ppo import show
from ppo.checkpoint_finding import find_checkpoint, place
from ppo.cli_options import CheckpointName, Json, ListsByDefault, RunId
from ppo.cli_runs import platform
from ppo.client import Client
from ppo.exits import Exit
from ppo.finding import find_run
from ppo.wire import Checkpoint

commands = typer.Typer(
    cls=ListsByDefault,
    no_args_is_help=True,
    help="List a run's checkpoints: ppo checkpoints RUN. Or verify, pin, name, remove or download one.",
)


@commands.command()
def ls(run: RunId, json: Json = False) -> None:
    """List a run's checkpoints, oldest first, with the reason for which each stays.

    Into a pipe or file: one a line, fields between tabs, no heading: id, segment:iteration, status, bytes, pinned,
    label, verified, why it stays.
    """
    with platform(json) as (client, _):
        found = client.checkpoints(find_run(client, run)["id"])
        if json:
            show.as_json(found)
        elif show.out.is_terminal:
            _table([checkpoint for checkpoint in found if checkpoint["status"] != "removed"])
        else:
            for checkpoint in found:
                print(*_fields(checkpoint), sep="\t")


@commands.command()
def verify(run: RunId, checkpoint: CheckpointName, json: Json = False) -> None:
    """Compare every file of a checkpoint with its manifest. Exit code 1 when it is damaged."""
    with platform(json) as (client, _):
        run_id, found = _find(client, run, checkpoint)
        answer = client.verify(run_id, found["id"])
        if json:
            show.as_json({**answer, "checkpoint": found["id"]})
        elif answer["ok"]:
            size = show.size(answer["bytes"])
            show.line(f"{found['id']} is whole: {answer['files']} files, {size}, in {answer['seconds']:.1f} s")
        else:
            show.line(f"{found['id']} is damaged: {answer['detail']}")
        if not answer["ok"]:
            raise typer.Exit(int(Exit.FAILED))


@commands.command()
def pin(run: RunId, checkpoint: CheckpointName, json: Json = False) -> None:
    """Have a checkpoint stay until the pin is taken away."""
    with platform(json) as (client, _):
        run_id, found = _find(client, run, checkpoint)
        _changed(client.pin(run_id, found["id"]), json)


@commands.command()
def unpin(run: RunId, checkpoint: CheckpointName, json: Json = False) -> None:
    """Leave a checkpoint to the rules again."""
    with platform(json) as (client, _):
        run_id, found = _find(client, run, checkpoint)
        _changed(client.unpin(run_id, found["id"]), json)


@commands.command()
def label(
    run: RunId,
    checkpoint: CheckpointName,
    text: Annotated[str, typer.Argument(help="Its name; an empty one takes it away.", show_default=False)],
    json: Json = False,
) -> None:
    """Name a checkpoint."""
    with platform(json) as (client, _):
        run_id, found = _find(client, run, checkpoint)
        _changed(client.label(run_id, found["id"], text or None), json)


@commands.command()
def rm(run: RunId, checkpoint: CheckpointName, json: Json = False) -> None:
    """Remove a checkpoint. Refused while something needs it; the newest good one always stays."""
    with platform(json) as (client, _):
        run_id, found = _find(client, run, checkpoint)
        client.delete(run_id, found["id"])
        if json:
            show.as_json({"removed": found["id"], "bytes": found["bytes"]})
        else:
            show.line(f"removed {found['id']} ({place(found)}); {show.size(found['bytes'])} are free within seconds")


@commands.command()
def download(
    run: RunId,
    checkpoint: CheckpointName,
    part: Annotated[
        Literal["all", "policy"], typer.Option(help="policy: only the folder that transformers and vLLM load.")
    ] = "all",
    to: Annotated[
        Path | None,
        typer.Option(help="Default: RUN-segment-S-iteration-N.tar here.", show_default=False),
    ] = None,
    json: Json = False,
) -> None:
    """Write a checkpoint to a tar file. It is there whole or not at all."""
    with platform(json) as (client, _):
        run_id, found = _find(client, run, checkpoint)
        stem = f"{run_id}-segment-{found['segment']}-iteration-{found['iteration']}"
        target = to or Path(f"{stem}{'-policy' if part == 'policy' else ''}.tar")
        if target.exists():
            show.line(f"error: {target} exists already; name another file with --to", show.err)
            raise typer.Exit(int(Exit.USAGE))
        try:
            size = client.download(run_id, found["id"], target, part=part)
        except OSError as error:
            show.line(f"error: {target} cannot be written: {error.strerror}", show.err)
            raise typer.Exit(int(Exit.FAILED)) from error
        if json:
            show.as_json({"checkpoint": found["id"], "file": str(target), "bytes": size})
        else:
            show.line(f"{target} ({show.size(size)})")


@commands.command("gc-preview")
def gc_preview(
    run: RunId,
    keep_last: Annotated[int | None, typer.Option(min=-1, help="Newest that stay; -1: all.")] = None,
    keep_every: Annotated[int | None, typer.Option(min=0, help="Multiples that stay; 0: no such rule.")] = None,
    keep_best: Annotated[int | None, typer.Option(min=0, help="Best by the judge that stay.")] = None,
    json: Json = False,
) -> None:
    """Say what pruning would remove and why the others stay, under the run's rules or those given. Nothing is done."""
    with platform(json) as (client, _):
        run_id = find_run(client, run)["id"]
        preview = client.gc_preview(run_id, keep_last=keep_last, keep_every=keep_every, keep_best=keep_best)
        if json:
            show.as_json(preview)
            return
        for item in preview["items"]:
            word = "stays" if item["stays"] else "goes "
            where = f"{item['segment']}:{item['iteration']}"
            show.line(f"{word}  {where:<10} {show.size(item['bytes']):>10}  {'; '.join(item['reasons'])}")
        show.line(f"{show.size(preview['freed_bytes'])} would be free; nothing was removed")


def _find(client: Client, run: str, checkpoint: str) -> tuple[str, Checkpoint]:
    run_id = find_run(client, run)["id"]
    return run_id, find_checkpoint(client, run_id, checkpoint)


def _changed(checkpoint: Checkpoint, json: bool) -> None:
    if json:
        show.as_json(checkpoint)
        return
    named = f", named {checkpoint['label']!r}" if checkpoint["label"] else ""
    pinned = "pinned" if checkpoint["pinned"] else "not pinned"
    show.line(f"{checkpoint['id']} ({place(checkpoint)}) is {pinned}{named}")


def _fields(checkpoint: Checkpoint) -> tuple[object, ...]:
    return (
        checkpoint["id"],
        place(checkpoint),
        checkpoint["status"],
        checkpoint["bytes"],
        "pinned" if checkpoint["pinned"] else "",
        checkpoint["label"] or "",
        checkpoint["verified_at"] or "",
        "; ".join(checkpoint["protected"]) or checkpoint["status_detail"] or "",
    )


def _table(checkpoints: list[Checkpoint]) -> None:
    if not checkpoints:
        show.line("no checkpoints")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for heading in ("checkpoint", "at", "status", "size", "label", "stays since it is"):
        table.add_column(heading, no_wrap=heading in ("checkpoint", "at", "size"))
    for checkpoint in checkpoints:
        table.add_row(
            checkpoint["id"],
            place(checkpoint),
            show.plain(
                checkpoint["status"] + (f": {checkpoint['status_detail']}" if checkpoint["status_detail"] else "")
            ),
            show.size(checkpoint["bytes"]),
            show.plain(checkpoint["label"] or ""),
            show.plain("; ".join(checkpoint["protected"]) or "– (goes at the next pruning)"),
        )
    show.out.print(table)


def register(app: typer.Typer) -> None:
    """Add `checkpoints` to the `ppo` command."""
    app.add_typer(commands, name="checkpoints")
