"""`python -m ppo_core.main SEGMENT_DIR --token N --attempt M`: one trainer process, from loading to its end code.

Whatever happens is in the journal's last event, `end`. The process then leaves by `os._exit`, so that no library's
own farewell can change the code or hang.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_core.control import Control
from ppo_core.errors import PPOCoreError, RunDirectoryError
from ppo_core.rundir import (
    ExitCode,
    JournalWriter,
    SegmentDir,
    SegmentStart,
    checkpoint_iteration,
    checkpoints,
    last_iteration,
    remove_leftovers,
)
from ppo_core.spec import SpecFaults, check_files, parse_spec

if TYPE_CHECKING:
    from ppo_core.trainer import Outcome

LOADING_DEADLINE_S = 1800.0


def run_segment(segment: SegmentDir, token: int, attempt: int, change: Callable[[Any], None] | None = None) -> ExitCode:
    """Run one segment in this process and journal how it ended.

    Args:
        segment: an existing segment folder with its `spec.json`.
        token: lease token; only commands for it are obeyed.
        attempt: counts starts of this run, for logs.
        change: called with the loaded `Trainer` before it starts; tests put their faults in by it.
    """
    with contextlib.closing(JournalWriter(segment.journal)) as journal:
        error: dict[str, str] | None = None
        try:
            outcome = _train(segment, token, attempt, journal, change)
            code, reason = outcome.code, outcome.reason
        except PPOCoreError as fault:
            code, reason = ExitCode(fault.exit_code), "error"
            error = _described(fault, fault.code, fault.hint)
        except MemoryError as fault:
            code, reason = ExitCode.FAULT, "error"
            error = _described(fault, "out_of_memory", "Lower update.token_budget or rollout.batch_size.")
        except Exception as fault:
            code, reason = ExitCode.FAULT, "error"
            hint = "This is a fault of the trainer; its traceback is kept with the run."
            error = _described(fault, "unexpected", hint)
        if error is not None:
            print(error["traceback"], file=sys.stderr, flush=True)
        iteration = journal.last.iteration if journal.last else 0
        journal.append("end", iteration, {"code": int(code), "reason": reason, "error": error})
    return code


def _train(
    segment: SegmentDir, token: int, attempt: int, journal: JournalWriter, change: Callable[[Any], None] | None
) -> Outcome:
    start = segment.read_start()
    journal.append("phase", 0, {"phase": "loading", "deadline_s": LOADING_DEADLINE_S})
    spec = parse_spec(start.spec)
    faults = check_files(spec)
    if faults:
        raise SpecFaults(faults)
    control = Control(segment, token, journal)
    control.listen_to_sigterm()
    remove_leftovers(segment)

    from ppo_core.assembly import assemble_trainer  # torch and transformers: seconds, so after the quick checks
    from ppo_core.trainer import started_payload

    resumed_from = _checkpoint_to_start_from(segment, start)
    trainer = assemble_trainer(segment, spec, resumed_from, journal, control)
    try:
        if change is not None:
            change(trainer)
        origin = str(resumed_from) if resumed_from else None
        first = trainer.state.iteration + 1
        journal.append("started", first - 1, started_payload(os.getpid(), attempt, token, origin, first))
        return trainer.train()
    finally:
        trainer.close()


def _checkpoint_to_start_from(segment: SegmentDir, start: SegmentStart) -> Path | None:
    own = checkpoints(segment)
    found = own[-1] if own else (Path(start.checkpoint) if start.checkpoint else None)
    stands = (checkpoint_iteration(found) or 0) if found else 0
    reached = last_iteration(segment)
    if reached > stands:
        raise RunDirectoryError(
            f"{segment.journal} reaches iteration {reached}, the newest checkpoint only {stands}; a restart from there "
            "needs a new segment"
        )
    return found


def _described(fault: BaseException, code: str, hint: str) -> dict[str, str]:
    return {
        "code": code,
        "message": str(fault) or type(fault).__name__,
        "hint": hint,
        "traceback": "".join(traceback.format_exception(fault)),
    }


def main() -> None:
    """Parse the command line, run, leave."""
    parser = argparse.ArgumentParser(prog="python -m ppo_core.main", description="Train one segment of a run.")
    parser.add_argument("segment", type=Path, help="the segment's folder, with its spec.json")
    parser.add_argument("--token", type=int, default=0, help="lease token whose commands are obeyed")
    parser.add_argument("--attempt", type=int, default=1, help="number of this start, for logs")
    arguments = parser.parse_args()
    # Before torch is imported. Threads that wait by spinning for long starve as soon as the machine has other work, and
    # beside a platform and a browser it has; threads that sleep at once are 1.4 times slower on an idle one.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        code = int(run_segment(SegmentDir(arguments.segment.resolve()), arguments.token, arguments.attempt))
    except PPOCoreError as fault:
        print(f"{fault.code}: {fault}", file=sys.stderr)
        code = fault.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
