"""What the command line prints: runs, faults and errors, for people or as JSON. It asks nobody anything."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ppo.access import NoAccess, NoPlatform
from ppo.checkpoint_finding import NoSuchCheckpointError
from ppo.client import AccessError, ClientError, NotFoundError, RequestError, UnreachableError, WaitTimeoutError
from ppo.exits import Exit
from ppo.finding import AmbiguousRunError
from ppo.run_view import MAIN_METRICS
from ppo.wire import Command, Run
from ppo_core.rundir import number
from ppo_core.spec import SpecFaults

out = Console()
err = Console(stderr=True)
WIDE = 100  # columns of a terminal
LISTINGS = {"run": "ppo ls", "worker": "ppo workers", "alert": "ppo alerts", "webhook": "ppo webhooks"}


def line(text: str, console: Console = out) -> None:
    """A line as it is: names and messages are data, never markup."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def as_json(value: Any) -> None:
    """One JSON document on standard output."""
    json.dump(value, sys.stdout, ensure_ascii=False, indent=2)
    sys.stdout.write("\n")
    sys.stdout.flush()


def plain(text: str) -> Text:
    """Text for a table's cell: data, never markup."""
    return Text(text)


def size(num_bytes: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def run_table(runs: Iterable[Run]) -> None:
    """One row a run, for a terminal: where it is narrow, long names and reasons are cut and nothing else is."""
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    headings = ["run", "name", "state", "iteration", "score", "KL"]
    if out.width >= WIDE:  # The newest are on top anyway.
        headings.append("created (UTC)")
    for heading in headings:
        table.add_column(heading, no_wrap=heading not in ("name", "state"))
    for run in runs:
        row = (
            run["id"],
            Text(run["name"], no_wrap=True, overflow="ellipsis"),
            Text(_state_or_wait(run), no_wrap=True, overflow="ellipsis"),
            _progress(run),
            *_score_and_kl(run),
            run["created_at"][:16].replace("T", " "),
        )
        table.add_row(*row[: len(headings)])
    out.print(table)


def run_lines(runs: Iterable[Run]) -> None:
    """One line a run, for programs: fields between tabs, nothing cut; a name holds no tab by the spec's rule."""
    for run in runs:
        reason, health = run["reason_code"] or "", run["health"]
        fields = (run["id"], run["name"], run["state"], reason, health, _progress(run), *_score_and_kl(run))
        print(*fields, run["created_at"], sep="\t")


def _state_or_wait(run: Run) -> str:
    return f"queued: {run['waiting_reason']}" if run["waiting_reason"] else state(run)


def _progress(run: Run) -> str:
    return f"{run['iteration']}/{run['num_iterations']}"


def _score_and_kl(run: Run) -> tuple[str, str]:
    return number(run["latest"].get("reward/score_mean")), number(run["latest"].get("kl/ref_sequence"))


def state(run: Run) -> str:
    """State, why, and whether it is in trouble."""
    words: list[str] = [run["state"]]
    if run["reason_code"] and run["reason_code"] != run["state"]:
        words.append(f"({run['reason_code']})")
    if run["health"] != "ok":
        words.append(f"[{run['health']}]")
    if alerts := alert_counts(run):
        words.append(f"[{alerts}]")
    return " ".join(words)


def alert_counts(run: Run) -> str:
    """How many alerts are open, the worst first; empty where none is."""
    counts = run["alerts"]
    named = [(counts["critical"], "critical alert"), (counts["warning"], "alert")]
    return ", ".join(f"{count} {name}{'' if count == 1 else 's'}" for count, name in named if count)


def run_page(run: Run, url: str) -> None:
    """One run, as far as a screen goes."""
    line(f"{run['name']}  {run['id']}")
    for label, value in (
        ("state", state(run)),
        ("why", run["reason_detail"]),
        ("remedy", run["hint"]),
        ("waits for", run["waiting_reason"]),
        ("notes", run["notes"]),
        ("phase", run["phase"]),
        ("iteration", f"{run['iteration']} of {run['num_iterations']}"),
        ("priority", str(run["priority"])),
        ("page", url),
    ):
        if value:
            first, *others = str(value).splitlines()
            line(f"  {label:<10} {first}")
            for other in others:
                line(f"  {'':<10} {other}")
    for name in MAIN_METRICS:
        if name in run["latest"]:
            line(f"  {name:<38} {number(run['latest'][name])}")


def command(command: Command) -> None:
    """What became of something asked."""
    detail = f": {command['detail']}" if command["detail"] else ""
    line(f"{command['kind']} {command['status']}{detail}  ({command['id']})")


def dry_run(meaning: Iterable[str], warnings: Iterable[str], end: str) -> None:
    """What a spec would do."""
    for text in meaning:
        line(text)
    for text in warnings:
        line(f"warning: {text}")
    line(end)


@contextlib.contextmanager
def errors(json_wanted: bool) -> Iterator[None]:
    """The one place where the command line turns errors into words and exit codes."""
    try:
        yield
    except SpecFaults as error:
        faults = [{"pointer": fault.pointer, "message": fault.message} for fault in error.faults]
        raise _leave(json_wanted, Exit.USAGE, "bad_spec", error.heading, faults) from error
    except NoPlatform as error:
        raise _leave(json_wanted, Exit.UNREACHABLE, "no_platform", str(error)) from error
    except NoAccess as error:
        raise _leave(json_wanted, Exit.AUTH, "no_access", str(error)) from error
    except AccessError as error:
        detail = f"{error.detail} (the key comes from PPO_KEY, or from client.json of the platform's data folder)"
        raise _leave(json_wanted, Exit.AUTH, error.code, detail) from error
    except UnreachableError as error:
        raise _leave(json_wanted, Exit.UNREACHABLE, "unreachable", f"{error}; is `ppo up` running?") from error
    except WaitTimeoutError as error:
        raise _leave(json_wanted, Exit.TIMED_OUT, "timed_out", str(error)) from error
    except RequestError as error:
        usage = isinstance(error, NotFoundError) or error.status in (400, 409, 410, 412, 413, 422)
        code = Exit.USAGE if usage else Exit.UNREACHABLE if error.status >= 500 else Exit.FAILED
        raise _leave(json_wanted, code, error.code, error.detail + _where_listed(error.detail), error.errors) from error
    except AmbiguousRunError as error:
        raise _leave(json_wanted, Exit.USAGE, "ambiguous", str(error)) from error
    except NoSuchCheckpointError as error:
        raise _leave(json_wanted, Exit.USAGE, "not_found", str(error)) from error
    except ClientError as error:
        raise _leave(json_wanted, Exit.FAILED, "client", str(error)) from error


def _where_listed(detail: str) -> str:
    """The sentence that names the command which lists what there is, where a thing looked up by name is missing."""
    missing = re.match(r"There is no (\w+) ['\"]", detail)
    listing = LISTINGS.get(missing[1]) if missing else None
    return f" See `{listing}`." if listing else ""


def _leave(
    json_wanted: bool, code: Exit, name: str, detail: str, faults: Iterable[Mapping[str, Any]] = ()
) -> typer.Exit:
    """Say what is wrong, one fault a line, and give the exception that ends the command."""
    faults = list(faults)
    if json_wanted:
        as_json({"error": {"code": name, "detail": detail, "errors": faults}})
    elif len(faults) == 1 and not faults[0]["pointer"]:
        line(f"error: {faults[0]['message']}", err)  # A fault of no field in particular says it all.
    else:
        line(f"error: {detail}", err)
        for fault in faults:
            line(f"  {fault['pointer'] or '/'}: {fault['message']}", err)
    return typer.Exit(int(code))
