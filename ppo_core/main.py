"""`python -m ppo_core.main SEGMENT_DIR --token N --attempt M`: one trainer process, from loading to its end code.

A run of several ranks is as many of these, told apart by RANK and WORLD_SIZE. Whatever happens is in the journal's last
event, `end`, which rank 0 writes. Another rank that fails by itself leaves its fault in a file beside its log; one that
finds the others gone leaves without a word. The process leaves by `os._exit`, so that no library's own farewell can
change the code or hang.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_core.errors import DiskFullError, PPOCoreError, RankLostError, RunDirectoryError
from ppo_core.logged_journal import LoggedJournal
from ppo_core.rundir import (
    ExitCode,
    Journal,
    JournalWriter,
    SegmentDir,
    SegmentStart,
    SilentJournal,
    checkpoint_iteration,
    checkpoints,
    last_iteration,
    no_space_left,
    remove_leftovers,
    reserved_space,
    write_atomically,
)
from ppo_core.spec import SpecFaults, check_files, parse_spec

if TYPE_CHECKING:
    from ppo_core.trainer import Outcome

LOADING_DEADLINE_S = 1800.0
# No end code: whoever started the ranks sees how each of them left, and decides by that.
NO_LAST_WORD = 1
# Words of faults in exchanges between ranks that are of the other side, gone or late.
GLOO_SAYS_OF_PEERS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "timeout caused pair closure",
)
NCCL_SAYS_OF_PEERS = ("ncclRemoteError", "remote process exited", "Watchdog caught collective operation timeout")
TORCH_SAYS_OF_PEERS = ("DistNetworkError",)  # by name: torch is not loaded here


def run_segment(segment: SegmentDir, token: int, attempt: int, change: Callable[[Any], None] | None = None) -> ExitCode:
    """Run one segment in this process and journal how it ended.

    Args:
        segment: an existing segment folder with its `spec.json`.
        token: lease token; only commands for it are obeyed.
        attempt: counts starts of this run, for logs.
        change: called with the loaded `Trainer` before it starts; tests put their faults in by it.
    """
    rank = int(os.environ.get("RANK", "0"))
    journal: Journal = SilentJournal() if rank else LoggedJournal(JournalWriter(segment.journal))
    with contextlib.closing(journal):
        error: dict[str, Any] | None = None
        unasked: dict[str, str | None] = {}
        try:
            with contextlib.nullcontext() if rank else reserved_space(segment.reserve):
                outcome = _train(segment, token, attempt, journal, change)
            code, reason = outcome.code, outcome.reason
            if outcome.why is not None:
                unasked = {"why": outcome.why, "hint": outcome.hint}
        except RankLostError:
            raise
        except PPOCoreError as fault:
            code, reason = ExitCode(fault.exit_code), fault.end_reason
            error = _described(fault, fault.code, fault.hint)
        except MemoryError as fault:
            code, reason = ExitCode.FAULT, "error"
            error = _described(fault, "out_of_memory", "Lower update.token_budget or rollout.batch_size.")
        except Exception as fault:
            if peers_are_gone(fault):
                raise RankLostError(f"rank {rank} lost the other ranks: {fault}") from fault
            if isinstance(fault, OSError) and no_space_left(fault):  # samples, batches kept, the journal itself
                code, reason = ExitCode(DiskFullError.exit_code), DiskFullError.end_reason
                error = _described(fault, DiskFullError.code, DiskFullError.hint)
            else:
                code, reason = ExitCode.FAULT, "error"
                remedy = "This is a fault of the trainer; its traceback is kept with the run."
                error = _described(fault, "unexpected", remedy)
        if error is not None:
            with contextlib.suppress(OSError):  # The log may lie on the disk that is full.
                print(error["traceback"], file=sys.stderr, flush=True)
            if rank and reason == PPOCoreError.end_reason:
                fault_file = segment.fault(attempt, rank)
                write_atomically(fault_file, json.dumps({**error, "exit_code": int(code)}) + "\n")
        iteration = journal.last.iteration if journal.last else 0
        journal.append("end", iteration, {"code": int(code), "reason": reason, "error": error, **unasked})
    return code


def _train(
    segment: SegmentDir, token: int, attempt: int, journal: Journal, change: Callable[[Any], None] | None
) -> Outcome:
    start = segment.read_start()
    journal.append("phase", 0, {"phase": "loading", "deadline_s": LOADING_DEADLINE_S})
    spec = parse_spec(start.spec)
    faults = check_files(spec)
    if faults:
        raise SpecFaults(faults)

    from ppo_core.assembly import assemble_trainer  # torch and transformers: seconds, so after the quick checks
    from ppo_core.control import Control
    from ppo_core.ranks import Ranks
    from ppo_core.trainer import started_payload

    ranks = Ranks.join(spec.training.peer_timeout_s)
    if ranks.size != spec.training.ranks:
        raise RunDirectoryError(
            f"WORLD_SIZE is {ranks.size} but training.ranks of {segment.spec} is {spec.training.ranks}"
        )
    control = Control(segment, token, journal, ranks)
    control.listen_to_sigterm()
    ranks.first(lambda: remove_leftovers(segment))
    resumed_from = ranks.first(lambda: _checkpoint_to_start_from(segment, start))
    trainer = assemble_trainer(segment, spec, resumed_from, journal, control, ranks)
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


def peers_are_gone(fault: BaseException) -> bool:
    """Whether an exchange failed since another rank is gone or late, in a library that says so by a `RuntimeError`.

    A wrong type, a wrong size or no memory in an exchange are faults of this rank, and its own.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or not isinstance(fault, RuntimeError):
        return False
    said = str(fault)
    if "gloo/transport" in said:  # where gloo speaks to others; its other places look at what it is given
        return any(word in said for word in GLOO_SAYS_OF_PEERS)
    return type(fault).__name__ in TORCH_SAYS_OF_PEERS or any(word in said for word in NCCL_SAYS_OF_PEERS)


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
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout)
    logging.getLogger("ppo_core").setLevel(logging.INFO)  # Of libraries only warnings.
    try:
        code = int(run_segment(SegmentDir(arguments.segment.resolve()), arguments.token, arguments.attempt))
    except RankLostError as fault:
        print(f"{fault.code}: {fault}", file=sys.stderr)
        code = NO_LAST_WORD
    except PPOCoreError as fault:
        print(f"{fault.code}: {fault}", file=sys.stderr)
        code = fault.exit_code
    except Exception:  # Not even its end could be written.
        traceback.print_exc()
        code = NO_LAST_WORD
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
