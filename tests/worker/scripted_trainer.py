"""A trainer that trains nothing: it speaks the run directory's contract, and fails on purpose as real ones do.

`python tests/worker/scripted_trainer.py SEGMENT_DIR --token N --attempt M`, set as PPO_TRAINER_COMMAND. What it does is
written as JSON in the environment variable PPO_SCRIPTED, and under `scripted` in the run's spec, which wins:

    iterations 10 (the spec's own, if it has some)   iteration_s 0.05     loading_s 0
    checkpoint_every 5      checkpoint_bytes 100     metrics 5 a line     samples 2 a line
    also [name, ...]: more metrics in every line
    nan_at, die_at, hang_at: iterations; `attempts` (a number, default 1) says in how many attempts the last two count
    end_at [iteration, code]                         fail_loading code    torn_at: dies in the middle of a line
    disk_full_at: iteration from which on no checkpoint can be written, in the first `attempts` attempts
    alerts [payload, ...]: `alert` events, each at its own `iteration`, or at `cleared_at` for one that clears
    gates [[iteration, payload], ...]: `gate` events
    preflight payload: a `preflight` event before the first iteration
    ignore_stop true: neither commands nor SIGTERM   children 3: one in a session of its own, one deaf to SIGTERM
    phase_s 60: the deadline announced for each phase
    hold [phase, iteration]: stays in the middle of a "loading" (0), "iteration" or "saving" until the file
        PPO_WITNESS.RUN.go is there, in the first `attempts` attempts; an iteration also until it is asked to stop
    clock_jump [iteration, seconds]: from that iteration on its journal has other times

Of several ranks (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) the first alone looks at commands and writes. All meet in
every iteration (`scripted_ranks`); one whose connection breaks, or that waits longer than `meeting_s`, leaves with 1.

    rank 0: whom die_at, freeze_at (SIGSTOP), fault_at (leaves its fault) and leave_at [iteration, code] are about
    linger_s: how long the other ranks stay when the run has come to rest     stays true: nobody leaves a broken meeting
    echoes true: rank 0 takes a broken meeting for a fault of its own

PPO_WITNESS names a file to which it appends "run segment attempt token iteration pid what time" lines, outside of all
that the platform knows; the time is the machine's monotonic one. "beside-PID" is a process of an earlier attempt that
was still there when this one started.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import ppo_core.rundir.journal
from ppo_core.errors import CheckpointError
from ppo_core.rundir import (
    MANIFEST,
    JournalWriter,
    SegmentDir,
    checkpoint_bytes,
    checkpoint_iteration,
    checkpoints,
    new_checkpoint,
    read_commands,
    remove_leftovers,
    verify_checkpoint,
)

# Under `ppo up` Python looks for nothing beside the program that it runs.
sys.path.insert(0, str(Path(__file__).parent))
from scripted_ranks import RANK, SIZE, Meeting, follow, misbehave
from strays import strays

SLEEPER = "import signal, sys, time; sys.argv[1:] and signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


DISK_FULL = {"code": "disk_full", "message": "no space left to write it", "hint": "free space", "traceback": ""}


class NoSpace(Exception):
    """What a trainer meets whose disk is full."""


def move_clock(seconds: float) -> None:
    """Let the journal's clock be another one from now on."""

    class Moved(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + timedelta(seconds=seconds)

    ppo_core.rundir.journal.datetime = Moved  # type: ignore[misc,attr-defined]


class ScriptedTrainer:
    """One attempt."""

    def __init__(self, segment: SegmentDir, token: int, attempt: int) -> None:
        self.segment = segment
        self.token = token
        self.attempt = attempt
        self.start = segment.read_start()
        spec = self.start.spec
        self.knobs: dict[str, Any] = {
            "iterations": spec.get("iterations", 10),
            "iteration_s": 0.05,
            "checkpoint_every": 5,
            "attempts": 1,
            "rank": 0,
            "meeting_s": 3,
            **json.loads(os.environ.get("PPO_SCRIPTED", "{}")),
            **spec.get("scripted", {}),
        }
        self.terminated = False
        self.answered: set[str] = set()
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, *_: object) -> None:
        self.terminated = not self.knobs.get("ignore_stop")

    def knob(self, name: str) -> Any:
        return self.knobs.get(name)

    def mischief(self, name: str, iteration: int) -> bool:
        return bool(self.knob(name) == iteration and self.attempt <= self.knobs["attempts"] and self.knob("rank") == 0)

    def witness(self, iteration: int, what: str) -> None:
        path = os.environ.get("PPO_WITNESS")
        if path:
            words = [self.start.run_id, self.start.segment, self.attempt, self.token, iteration, os.getpid(), what]
            words.append(time.monotonic())
            with open(path, "a", encoding="utf-8") as file:
                file.write(" ".join(map(str, words)) + "\n")

    def run(self) -> int:
        self.witness(0, f"port-{os.environ.get('MASTER_PORT')}")
        if RANK:
            self.witness(0, f"start-{RANK}")
            return follow(Meeting(self.knobs["meeting_s"]), self.segment, self.attempt, self.knobs)
        self.witness(0, "start")
        for pid in strays(self.start.run_id, self.token - 1):
            self.witness(0, f"beside-{pid}")
        self.journal = JournalWriter(self.segment.journal)
        self.meeting = Meeting(self.knobs["meeting_s"]) if SIZE > 1 else None
        try:
            code = self.train()
        except NoSpace:
            code = self.end(10, "disk_full", self.journal.last.iteration if self.journal.last else 0, DISK_FULL)
        self.tell(f"leave {code}")
        return code

    def tell(self, word: str) -> None:
        if self.meeting is not None:
            self.meeting.tell(word)

    def train(self) -> int:
        self.announce("loading", 0)
        for number in range(self.knob("children") or 0):
            deaf = ["deaf"] if number == 1 else []
            subprocess.Popen([sys.executable, "-c", SLEEPER, *deaf], start_new_session=number == 0)
        time.sleep(self.knob("loading_s") or 0)
        self.hold("loading", 0)
        if self.knob("fail_loading"):
            error = {"code": "spec", "message": "it cannot be", "hint": "change it", "traceback": ""}
            return self.end(self.knob("fail_loading"), "error", 0, error)
        remove_leftovers(self.segment)
        own = checkpoints(self.segment)
        origin = own[-1] if own else (Path(self.start.checkpoint) if self.start.checkpoint else None)
        try:
            if origin is not None:
                verify_checkpoint(origin)
        except CheckpointError as error:
            fault = {"code": error.code, "message": str(error), "hint": error.hint, "traceback": ""}
            return self.end(error.exit_code, "error", 0, fault)
        iteration = (checkpoint_iteration(origin) or 0) if origin else 0
        self.journal.append(
            "started",
            iteration,
            {
                "pid": os.getpid(),
                "attempt": self.attempt,
                "token": self.token,
                "resumed_from": str(origin) if origin else None,
                "first_iteration": iteration + 1,
                "versions": {},
            },
        )
        self.witness(iteration, "started")
        if self.knob("preflight") and iteration == 0:
            self.journal.append("preflight", 0, self.knob("preflight"))
        while iteration < self.knobs["iterations"]:
            deadline = time.monotonic() + self.knobs["iteration_s"]
            while True:
                asked = self.asked(iteration)
                if asked is not None:
                    return self.come_to_rest(iteration, asked)
                if time.monotonic() >= deadline:
                    break
                time.sleep(0.01)
            iteration += 1
            code = self.one_iteration(iteration)
            if code is not None:
                return code
        self.save(iteration, "final")
        return self.end(0, "goal", iteration)

    def one_iteration(self, iteration: int) -> int | None:
        self.announce("rollout", iteration)
        self.tell(f"iteration {iteration}")
        if self.mischief("die_at", iteration):
            self.witness(iteration, "die")
        if self.attempt <= self.knobs["attempts"] and self.knob("rank") == 0:
            misbehave(iteration, self.segment, self.attempt, self.knobs)
        if self.mischief("torn_at", iteration):
            with self.segment.journal.open("a", encoding="ascii") as file:
                file.write('{"seq":99,"type":"metrics","iter')
            os.kill(os.getpid(), signal.SIGKILL)
        if self.mischief("hang_at", iteration):
            while True:
                time.sleep(60)
        if self.knob("clock_jump") and self.knob("clock_jump")[0] == iteration:
            move_clock(self.knob("clock_jump")[1])
        self.hold("iteration", iteration)
        names = [
            "reward/score_mean",
            "kl/ref_token",
            *(f"scripted/{n}" for n in range((self.knob("metrics") or 5) - 2)),
            *(self.knob("also") or ()),
        ]
        metrics = {name: iteration + number / 8 for number, name in enumerate(names)}
        if self.knob("nan_at") == iteration:
            metrics["reward/score_mean"] = float("nan")
        self.journal.append("metrics", iteration, {**metrics, "data/response_tokens": 100.0})
        for held_at, gate in self.knob("gates") or ():
            if held_at == iteration:
                self.journal.append("gate", iteration, gate)
        for alert in self.knob("alerts") or ():
            if alert.get("cleared_at", alert["iteration"]) == iteration:
                self.journal.append("alert", iteration, alert)
        self.write_samples(iteration)
        self.witness(iteration, "iteration")
        if self.knob("end_at") and self.knob("end_at")[0] == iteration:
            self.save(iteration, "gate")
            error = {"code": "first_minibatch_ratio", "message": "ratio is 1.034", "hint": "compare", "traceback": "T"}
            code = self.knob("end_at")[1]
            return self.end(
                code, "gate" if code in (10, 69) else "error", iteration, error if code < 69 or code == 70 else None
            )
        if iteration % self.knobs["checkpoint_every"] == 0:
            self.save(iteration, "schedule")
        return None

    def announce(self, phase: str, iteration: int) -> None:
        self.journal.append("phase", iteration, {"phase": phase, "deadline_s": self.knob("phase_s") or 60.0})

    def hold(self, phase: str, iteration: int) -> None:
        if self.knob("hold") != [phase, iteration] or self.attempt > self.knobs["attempts"]:
            return
        released = Path(f"{os.environ['PPO_WITNESS']}.{self.start.run_id}.go")
        self.witness(iteration, f"held-{phase}")
        while not released.exists() and not (phase == "iteration" and self.asked(iteration)):
            time.sleep(0.02)

    def write_samples(self, iteration: int) -> None:
        number = self.knobs.get("samples", 2)
        record = {"kind": "train", "prompt": "p", "response": "r", "score": 0.5, "penalized_score": 0.5, "length": 1}
        path = self.segment.samples / f"iter-{iteration:06d}.jsonl"
        lines = (
            json.dumps({**record, "index": n, "finish_reason": "stop", "tokens": {"ids": [n]}}) for n in range(number)
        )
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        self.journal.append("samples", iteration, {"path": f"samples/{path.name}", "num": number})

    def asked(self, iteration: int) -> str | None:
        """ "stop" or "pause"; checkpoints are made on the way."""
        if self.knob("ignore_stop"):
            return None
        worst = "stop" if self.terminated else None
        for command in read_commands(self.segment, self.token):
            if command.id not in self.answered:
                self.answered.add(command.id)
                self.ack(iteration, command.id, command.kind, "accepted")
                if command.kind == "checkpoint":
                    self.save(iteration, "command")
                    self.ack(iteration, command.id, command.kind, "done")
            if command.kind != "checkpoint" and worst != "stop":
                worst = command.kind
        return worst

    def ack(self, iteration: int, command: str, kind: str, status: str) -> None:
        payload = {"command": command, "kind": kind, "status": status, "detail": None}
        self.journal.append("ack", iteration, payload)

    def come_to_rest(self, iteration: int, asked: str) -> int:
        self.save(iteration, asked)
        for command in read_commands(self.segment, self.token):
            self.ack(iteration, command.id, command.kind, "done")
        return self.end(11, "stopped", iteration) if asked == "stop" else self.end(10, "paused", iteration)

    def save(self, iteration: int, reason: str) -> None:
        target = self.segment.checkpoint(iteration)
        if target.exists():
            return
        if iteration >= (self.knob("disk_full_at") or iteration + 1) and self.attempt <= self.knobs["attempts"]:
            raise NoSpace
        self.announce("saving", iteration)
        try:
            with new_checkpoint(target) as folder:
                (folder / "state.json").write_text(json.dumps({"iteration": iteration}))
                self.hold("saving", iteration)
                (folder / "weights").write_bytes(b"w" * (self.knob("checkpoint_bytes") or 100))
        except OSError as error:
            raise (NoSpace if error.errno == errno.ENOSPC else error) from error
        payload = {
            "path": f"checkpoints/{target.name}",
            "bytes": checkpoint_bytes(target),
            "manifest_sha256": hashlib.sha256((target / MANIFEST).read_bytes()).hexdigest(),
            "reason": reason,
            "judge_score": None,
        }
        self.journal.append("checkpoint", iteration, payload)

    def end(self, code: int, reason: str, iteration: int, error: dict[str, str] | None = None) -> int:
        self.journal.append("end", iteration, {"code": code, "reason": reason, "error": error})
        self.witness(iteration, f"end-{code}")
        return code


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("segment", type=Path)
    parser.add_argument("--token", type=int, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    arguments = parser.parse_args()
    print(f"scripted attempt {arguments.attempt} with token {arguments.token}", flush=True)
    trainer = ScriptedTrainer(SegmentDir(arguments.segment), arguments.token, arguments.attempt)
    try:
        code = trainer.run()
    except OSError as error:
        print(f"rank {RANK}: the meeting broke: {error!r}", flush=True)
        while trainer.knob("stays"):
            time.sleep(60)
        code = 1
        if trainer.knob("echoes") and not RANK:
            fault = {"code": "unexpected", "message": str(error), "hint": "", "traceback": ""}
            code = trainer.end(70, "error", trainer.journal.last.iteration if trainer.journal.last else 0, fault)
    os._exit(code)


if __name__ == "__main__":
    main()
