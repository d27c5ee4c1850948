"""Commands that take a run back or on: rollback, fork, resume, retry, pause, checkpoint; segments and lineage."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from ppo import show
from ppo.checkpoint_finding import find_checkpoint
from ppo.cli_options import CheckpointName, Json, Overrides, RunId
from ppo.cli_runs import platform
from ppo.client import Client
from ppo.exits import Exit
from ppo.finding import find_run
from ppo.wire import Command, ForkPreview, LineageSegment, RollbackPreview, Segment
from ppo_core.spec import read_settings

Reason = Annotated[str | None, typer.Option(help="Why, for whoever reads the run's history.", show_default=False)]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what it would mean; change nothing.")]
Wait = Annotated[
    bool,
    typer.Option(
        "--wait",
        help="Until it has been done, not until the run ends. Exit code 1 when it was not, 5 after --timeout.",
    ),
]
REPEATS = (
    "nothing that alters numbers changes: it would do again, bit for bit, what followed the checkpoint; set data.seed "
    "for another order of prompts and other samples"
)
Timeout = Annotated[float | None, typer.Option(min=0, help="Seconds that --wait takes at most.", show_default=False)]


def rollback(
    run: RunId,
    checkpoint: CheckpointName,
    set_: Overrides = None,
    reason: Reason = None,
    dry_run: DryRun = False,
    wait: Wait = False,
    timeout: Timeout = None,
    json: Json = False,
) -> None:
    """Take a run back to a checkpoint, with changed settings if wanted. Nothing is deleted; it can be undone so, too.

    It works whatever the run is doing: a running one saves first, and goes on from the checkpoint in a new segment.
    """
    with show.errors(json):
        settings = read_settings(set_ or [])
    with platform(json) as (client, _):
        found = find_run(client, run)
        target = find_checkpoint(client, found["id"], checkpoint)["id"]
        if dry_run:
            _preview(client.rollback_preview(found["id"], target, settings=settings), json)
            return
        command = client.rollback(found["id"], target, settings=settings, reason=reason, version=found["version"])
        _tell(client, command, wait, timeout, json)


def fork(
    run: RunId,
    checkpoint: CheckpointName,
    name: Annotated[str | None, typer.Option(help="The new run's name.", show_default=False)] = None,
    set_: Overrides = None,
    reason: Reason = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Queue a new run that goes on from a checkpoint of this one, with changed settings if wanted."""
    with show.errors(json):
        settings = read_settings(set_ or [])
    with platform(json) as (client, access):
        run_id = find_run(client, run)["id"]
        target = find_checkpoint(client, run_id, checkpoint)["id"]
        if dry_run:
            _preview(client.fork_preview(run_id, target, settings=settings, name=name), json)
            return
        made = client.fork(run_id, target, settings=settings, name=name, reason=reason)
        page = f"{access.url}/runs/{made['id']}"
        if json:
            show.as_json({**made, "url": page})
        else:
            show.line(f"{made['id']} ({made['name']}) is {made['state']}: {page}")


def resume(run: RunId, json: Json = False) -> None:
    """Queue a paused or stopped run again, from its newest good checkpoint; from the beginning without one."""
    with platform(json) as (client, _):
        _tell(client, client.resume(find_run(client, run)["id"]), False, None, json)


def retry(run: RunId, json: Json = False) -> None:
    """Queue a failed or cancelled run again, from its newest good checkpoint; from the beginning without one."""
    with platform(json) as (client, _):
        _tell(client, client.retry(find_run(client, run)["id"]), False, None, json)


def pause(run: RunId, wait: Wait = False, timeout: Timeout = None, json: Json = False) -> None:
    """Have a run save and give its place back until it is resumed."""
    with platform(json) as (client, _):
        _tell(client, client.pause(find_run(client, run)["id"]), wait, timeout, json)


def checkpoint(run: RunId, wait: Wait = False, timeout: Timeout = None, json: Json = False) -> None:
    """Have a run save after its present iteration, and go on."""
    with platform(json) as (client, _):
        _tell(client, client.checkpoint(find_run(client, run)["id"]), wait, timeout, json)


def segments(run: RunId, json: Json = False) -> None:
    """List the stretches of a run's history: where each began, how far it went, and what was changed.

    Into a pipe or file: one a line, fields between tabs, no heading: number, kind, active, start, last iteration,
    present iterations, started from, who, reason.
    """
    with platform(json) as (client, _):
        found = client.segments(find_run(client, run)["id"])
        if json:
            show.as_json(found)
        elif show.out.is_terminal:
            _segment_table(found)
        else:
            for segment in found:
                print(*_segment_fields(segment), sep="\t")


def lineage(run: RunId, json: Json = False) -> None:
    """Show a run, those it was forked from and its forks, with their segments."""
    with platform(json) as (client, _):
        run_id = find_run(client, run)["id"]
        found = client.lineage(run_id)
        if json:
            show.as_json(found)
            return
        for member in found["runs"]:
            mark = "*" if member["id"] == run_id else " "
            show.line(f"{mark} {member['id']}  {member['name']}  {member['state']}")
            for segment in member["segments"]:
                active = "  (active)" if segment["active"] else ""
                show.line(f"    {segment['number']}  {segment['kind']}{_from(segment)}, {_trained(segment)}{active}")
        if not found["complete"]:
            show.line(f"and more: the youngest forks are left out after {len(found['runs'])} runs")


def _tell(client: Client, command: Command, wait: bool, timeout_s: float | None, json: bool) -> None:
    """Say how a command stands, once it is finished where that is wanted, and leave with 1 if it was not done."""
    if wait:
        command = client.wait_command(command["run_id"], command["id"], timeout_s=timeout_s)
    if json:
        show.as_json(command)
    else:
        show.command(command)
    if command["status"] in ("failed", "superseded", "timed_out"):
        raise typer.Exit(int(Exit.FAILED))


def _preview(preview: RollbackPreview | ForkPreview, json: bool) -> None:
    if json:
        show.as_json(preview)
        return
    target = preview["checkpoint"]
    show.line(f"from checkpoint {target['id']}: iteration {target['iteration']} of segment {target['segment']}")
    behind: Any = preview.get("left_behind")
    if behind is not None:
        reach = f"iterations {behind['from_iteration']} to {behind['to_iteration']}"
        number = behind["checkpoints"]
        checkpoints = f"{number or 'no'} checkpoint{'' if number == 1 else 's'}"
        show.line(f"left behind, and kept: {reach} of segment {behind['segment']}, {checkpoints}")
    for change in preview["changes"]:
        values = f"{change['at_checkpoint']} at the checkpoint, {change['now']} now, {change['then']} then"
        show.line(f"{change['path']}: {values}")
    warnings = list(preview["warnings"])
    if behind is not None and preview.get("repeats_exactly"):
        warnings.append(REPEATS)
    show.dry_run(preview["meaning"], warnings, "nothing was changed")


def _segment_table(found: list[Segment]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for heading in ("segment", "kind", "from", "iterations", "present", "changed", "by", "reason"):
        table.add_column(heading, overflow="fold")
    for segment in found:
        changed = ", ".join(f"{each['path']} {each['before']} → {each['after']}" for each in segment["changes"])
        table.add_row(
            f"{segment['number']}{' *' if segment['active'] else ''}",
            segment["kind"],
            _origin(segment),
            _trained(segment).replace(" to ", "–"),
            _present(segment),
            show.plain(changed),
            show.plain(segment["created_by"] or ""),
            show.plain(segment["reason"] or ""),
        )
    show.out.print(table)


def _segment_fields(segment: Segment) -> list[str]:
    return [
        str(segment["number"]),
        segment["kind"],
        "active" if segment["active"] else "",
        str(segment["start_iteration"]),
        str(segment["last_iteration"]),
        _present(segment),
        _origin(segment),
        segment["created_by"] or "",
        " ".join((segment["reason"] or "").split()),
    ]


def _trained(segment: LineageSegment) -> str:
    """The iterations that it trained, which count from the one after its start."""
    first, last = segment["start_iteration"] + 1, segment["last_iteration"]
    return f"{first} to {last}" if first <= last else "nothing trained"


def _present(segment: LineageSegment) -> str:
    reach = segment["on_active_line"]
    return "" if reach is None else f"{reach[0]}-{reach[1]}"


def _origin(segment: LineageSegment) -> str:
    origin = segment["started_from"]
    if origin is None:
        return ""
    place = f"{origin['segment']}:{origin['iteration']}"
    return f"{origin['run_id']} {place}" if segment["kind"] == "fork" else place


def _from(segment: LineageSegment) -> str:
    origin = _origin(segment)
    return f" from {origin}" if origin else ""


def register(app: typer.Typer) -> None:
    """Add these commands to the `ppo` command."""
    for function in (rollback, fork, resume, retry, pause, checkpoint, segments, lineage):
        app.command()(function)
