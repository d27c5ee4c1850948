"""What else watches a run: `ppo gates` lists what its judge found, `ppo preflight` what was checked before it began."""

from __future__ import annotations

import typer
from rich.table import Table

from ppo import show
from ppo.cli_options import Json, RunId
from ppo.cli_runs import platform
from ppo.finding import find_run
from ppo.wire import Gate, GateWins
from ppo_core.rundir import number


def gates(run: RunId, json: Json = False) -> None:
    """List the judge gates that a run has held, the first first.

    Into a pipe or file: one a line, fields between tabs, no heading: segment:iteration, tripped or passed, win rate
    against the last gate and both ends of its interval, the same against the start, rise of the training score and its
    standard error, and `left` where a roll back has left it behind.
    """
    with platform(json) as (client, _):
        found_run = find_run(client, run)
        found = client.gates(found_run["id"])
        if json:
            show.as_json(found)
        elif not show.out.is_terminal:
            for gate in found:
                print(*_fields(gate), sep="\t")
        elif found:
            _table(found)
            show.line(found[-1]["explanation"])
        else:
            show.line("no gate has been held yet" if found_run["has_judge"] else "the run has no judge (gate.judge)")


def preflight(run: RunId, json: Json = False) -> None:
    """Say what was checked before a run's first iteration: each check, what it found, and what to do.

    Into a pipe or file: one a line, fields between tabs, no heading: check, ok, warning or failed, what it found, what
    to do.
    """
    with platform(json) as (client, _):
        found = client.alerts.preflight(find_run(client, run)["id"])
        if json:
            show.as_json(found)
            return
        for each in found["findings"]:
            if show.out.is_terminal:
                show.line(f"{each['status']:<8} {each['check']:<15} {each['detail']}")
                if each["remedy"]:
                    show.line(f"{'':<8} {'':<15} → {each['remedy']}")
            else:
                print(each["check"], each["status"], each["detail"], each["remedy"], sep="\t")
        if not found["findings"] and show.out.is_terminal:
            show.line("nothing has been checked yet")


def _fields(gate: Gate) -> tuple[object, ...]:
    wins = [gate[side][part] for side in ("against_last", "against_start") for part in ("rate", "low", "high")]
    numbers = [*wins, gate["rise"]["mean"], gate["rise"]["standard_error"]]
    verdict = "tripped" if gate["tripped"] else "passed"
    return f"{gate['segment']}:{gate['iteration']}", verdict, *map(number, numbers), "" if gate["active"] else "left"


def _table(found: list[Gate]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for heading in ("gate", "result", "against the last", "against the start", "training score"):
        table.add_column(heading, no_wrap=True)
    for gate in found:
        rise, error = gate["rise"]["mean"], gate["rise"]["standard_error"]
        table.add_row(
            f"{gate['segment']}:{gate['iteration']}",
            ("tripped" if gate["tripped"] else "passed") + ("" if gate["active"] else " (left)"),
            _wins(gate["against_last"]),
            _wins(gate["against_start"]),
            "–" if rise is None or error is None else f"{rise:+.3g} ± {2 * error:.2g}",
        )
    show.out.print(table)


def _wins(wins: GateWins) -> str:
    if wins["rate"] is None or wins["low"] is None or wins["high"] is None:
        return "–"
    return f"{wins['rate']:.0%} ({wins['low']:.2f}–{wins['high']:.2f})"


def register(app: typer.Typer) -> None:
    """Add these commands to the `ppo` command."""
    for function in (gates, preflight):
        app.command()(function)
