"""A trainer that trains nothing: it speaks the run directory's contract, as told by environment variables.

SCRIPTED_END        code to end with (0), or `none`: leave without an `end` event
SCRIPTED_SECONDS    time of an iteration (0.02)
SCRIPTED_SPAWNS     write the process id to this file
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from ppo_core.rundir import (
    ExitCode,
    JournalWriter,
    SegmentDir,
    checkpoint_bytes,
    checkpoint_iteration,
    checkpoints,
    new_checkpoint,
    read_commands,
    start_iteration,
)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("segment", type=Path)
    parser.add_argument("--token", type=int)
    parser.add_argument("--attempt", type=int)
    arguments = parser.parse_args()
    if pid_file := os.environ.get("SCRIPTED_SPAWNS"):
        Path(pid_file).write_text(str(os.getpid()))
    terminated: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, frame: terminated.append(signum))

    segment = SegmentDir(arguments.segment)
    start = segment.read_start()
    journal = JournalWriter(segment.journal)
    own = checkpoints(segment)
    first = (checkpoint_iteration(own[-1]) or 0 if own else start_iteration(start)) + 1
    print("the scripted trainer has begun", flush=True)
    journal.append("phase", 0, {"phase": "loading", "deadline_s": 60.0})
    journal.append(
        "started", first - 1,
        {
            "pid": os.getpid(), "attempt": arguments.attempt, "token": arguments.token, "resumed_from": None,
            "first_iteration": first, "versions": {},
        },
    )  # fmt: skip

    def save(iteration: int, reason: str) -> None:
        if segment.checkpoint(iteration).exists():
            return
        with new_checkpoint(segment.checkpoint(iteration)) as folder:
            (folder / "state.json").write_text(f'{{"iteration": {iteration}}}')
        journal.append(
            "checkpoint", iteration,
            {
                "path": f"checkpoints/iter-{iteration:06d}", "bytes": checkpoint_bytes(segment.checkpoint(iteration)),
                "manifest_sha256": "0" * 64, "reason": reason, "judge_score": None,
            },
        )  # fmt: skip

    iterations = start.spec["iterations"]
    for iteration in range(first, iterations + 1):
        time.sleep(float(os.environ.get("SCRIPTED_SECONDS", "0.02")))
        commands = read_commands(segment, arguments.token)
        if commands or terminated:
            for command in commands:
                journal.append(
                    "ack", iteration - 1, {"command": command.id, "kind": command.kind, "status": "accepted"}
                )
            save(iteration - 1, "stop")
            journal.append("end", iteration - 1, {"code": 11, "reason": "stopped", "error": None})
            return int(ExitCode.STOPPED)
        journal.append(
            "metrics", iteration,
            {"reward/score_mean": iteration / 7, "policy/entropy": float("nan"), "kl/ref_sequence": None},
        )  # fmt: skip
        if iteration % start.spec["checkpoints"]["every"] == 0:
            save(iteration, "schedule")
    end = os.environ.get("SCRIPTED_END", "0")
    if end == "none":
        print("something odd", file=sys.stderr)
        return 3
    save(iterations, "final")
    error = None
    if int(end) in (64, 65, 70):
        error = {"code": "data", "message": "row 3 is bad", "hint": "Correct row 3.", "traceback": "..."}
    journal.append("end", iterations, {"code": int(end), "reason": "error" if error else "goal", "error": error})
    return int(end)


if __name__ == "__main__":
    os._exit(main())
