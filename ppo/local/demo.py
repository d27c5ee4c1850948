"""`make demo`: the platform, the reviews example prepared and submitted, and its run shown here and in a browser.

Serves until Ctrl-C. With EXIT=1, or without a terminal, it ends with the run and the run's exit code.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import ppo.local
from ppo import exits, show, streams
from ppo.access import data_folder
from ppo.client import Client, ClientError, RequestError
from ppo.exits import Exit
from ppo.local.compare import Comparison, compare_metrics
from ppo.local.processes import StackError
from ppo.local.stack import DEFAULT_PORT, Stack
from ppo.local.up import Asked, ending_on_signals, make_stack, wait_for_failure
from ppo.spec_file import read_spec_file
from ppo.watching import watch
from ppo_core.spec import SpecFaults
from store.session import make_engine, session_factory

ROOT = Path(ppo.local.__file__).parents[2]
EXAMPLE = ROOT / "examples" / "reviews"
PATIENCE_S = 30.0


def prepare() -> None:
    """Make the example's models and prompts, or find them made; it shows its own progress.

    Raises:
        StackError: it failed, and has said why.
    """
    show.line("preparing the reviews example (a killed preparation goes on where it was)")
    done = subprocess.run(
        [sys.executable, "-m", "examples.reviews.prepare", "--out", str(EXAMPLE / "prepared")], cwd=ROOT, check=False
    )
    if done.returncode != 0:
        raise StackError(f"the example could not be prepared (exit code {done.returncode}); the reason stands above")


def compare(stack: Stack, run_id: str) -> Comparison:
    """Compare the run's journals with Postgres, value by value."""
    assert stack.database_url is not None
    engine = make_engine(stack.database_url, pool_size=1)
    try:
        with session_factory(engine)() as session:
            return compare_metrics(session, run_id, stack.data / "runs" / run_id)
    finally:
        engine.dispose()


def demo(stack: Stack, spec_file: Path, overrides: list[str], stay: bool) -> Exit:
    """Submit a spec to a stack that runs, and show the run. Returns when it is over; never when it has to stay."""
    with Client(stack.url, stack.admin_key) as client:
        run = client.submit(read_spec_file(spec_file, overrides))
        page = f"{stack.url}/runs/{run['id']}"
        show.line("")
        show.line(f"submitted {run['name']}: {page}")
        show.line(f"sign in once with {stack.login_link()}")
        show.line("")
        watch(client, run, show.out, patience_s=PATIENCE_S)
        ended = client.run(run["id"])
        comparison = compare(stack, run["id"])
    show.run_page(ended, page)
    show.line(str(comparison))
    if stay:
        show.line("the platform stays up; Ctrl-C stops it")
        wait_for_failure(stack.keeper.failed)
        raise StackError(stack.keeper.failure or "a part of the platform failed")
    show.line(f"the platform stops now; its data stay in {stack.data}, and `ppo up` shows this run again")
    if not comparison.equal:
        return Exit.FAILED
    return exits.of_ended(ended["state"], ended["reason_code"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m ppo.local.demo", description="Show PPO Control at work.")
    parser.add_argument("--data", type=Path, default=data_folder(), help="data folder of the platform")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="port; when taken, the next free one")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="change a field of the spec")
    arguments = parser.parse_args()
    stay = sys.stdout.isatty() and os.environ.get("EXIT") != "1"
    stack = make_stack(arguments.data, arguments.port, [ROOT], show.line)
    with ending_on_signals(stack):
        try:
            with stack:
                prepare()
                return int(demo(stack, EXAMPLE / "spec.yaml", arguments.set, stay))
        except Asked:
            return int(Exit.SUCCEEDED if stay else Exit.DETACHED)
        except (StackError, SpecFaults, RequestError, ClientError) as error:
            show.line(f"error: {error}", show.err)
            return int(Exit.FAILED)


if __name__ == "__main__":
    with streams.leaving_with_the_reader():
        sys.exit(main())
