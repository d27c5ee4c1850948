"""`ppo train`: one run in this terminal, with no platform. The trainer is a process of its own, as under the platform.

What a supervisor does there is done here for one run: it makes the segment, follows the journal, passes Ctrl-C on as a
stop command, and prunes checkpoints.
"""

from __future__ import annotations

import contextlib
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from rich.console import Console

from ppo.exits import Exit, of_trainer
from ppo.pruning import Pruner
from ppo.ranks import start_ranks
from ppo.run_view import view_for
from ppo.spec_file import read_spec_file
from ppo.this_machine import shortfalls
from ppo.train_rollback import rollback_start
from ppo_core.errors import CheckpointError, RunDirectoryError
from ppo_core.estimate import Estimate, estimate
from ppo_core.rundir import (
    LEAVING_GRACE_S,
    LOST_GRACE_S,
    ControlCommand,
    Event,
    ExitCode,
    RankExit,
    RankGroup,
    SegmentDir,
    SegmentStart,
    all_events,
    checkpoints,
    create_segment,
    describe_exits,
    echoes_a_rank,
    encode_event,
    end_of_log,
    find_fault,
    first_lost,
    is_unused,
    journalled_digest,
    next_start,
    read_journal,
    segments,
    send_command,
    verify_checkpoint,
)
from ppo_core.spec import Fault, RunSpec, SpecFaults, check_files, parse_spec, with_defaults

LOOK_EVERY_S = 0.1


@dataclass(frozen=True)
class Attempt:
    """One start of the trainer."""

    spec: RunSpec
    run_dir: Path
    segment: SegmentDir
    number: int
    warnings: tuple[str, ...] = ()

    @property
    def log(self) -> Path:
        return self.segment.log(self.number, 0)


def prepare(
    spec_file: Path, overrides: Sequence[str], run_dir: Path | None, resume: bool, rollback: str | None = None
) -> Attempt | None:
    """Check everything that can be checked without torch and make the segment; None when the run is done already.

    Args:
        rollback: the checkpoint that the run in `run_dir` goes back to, `20` or `2:20`.

    Raises:
        SpecFaults: all faults of the spec and of the files that it names, or a folder that cannot be used.
    """
    spec = _checked(spec_file, overrides)
    damaged: dict[Path, str] = {}
    if rollback is not None:
        folder = run_dir or _missing_run_dir("--rollback")
        start = rollback_start(folder, spec, rollback)
    elif resume:
        folder = (run_dir or _missing_run_dir("--resume")).resolve()  # A segment names its checkpoint by a whole path.
        damaged = _damaged(folder)
        again = _start_again(folder, spec, damaged)
        if again is None:
            return None
        start = again
    else:
        folder = run_dir or Path("runs") / f"{_slug(spec.name)}-{time.strftime('%Y%m%d-%H%M%S')}"
        _refuse_used(folder)
        start = SegmentStart(folder.name, 1, spec.model_dump(mode="json"))
    try:
        segment = create_segment(folder.resolve(), start)
    except OSError as error:
        raise SpecFaults(
            [Fault("", f"--run-dir {folder}: {error.strerror}; give a folder that can be written")]
        ) from error
    attempts = sum(1 for one in segments(folder) for _ in one.logs.glob("attempt-*-rank-0.log"))
    warnings = tuple(f"damaged checkpoint, passed over: {fault}" for fault in damaged.values())
    return Attempt(spec, folder.resolve(), segment, attempts + 1, warnings)


def what_it_means(spec_file: Path, overrides: Sequence[str]) -> Estimate:
    """The same checks, and what the spec means in numbers; nothing is made or started.

    Raises:
        SpecFaults: as `prepare`.
    """
    return estimate(_checked(spec_file, overrides))


def train(attempt: Attempt, console: Console, as_json: bool) -> Exit:
    """Run the trainer to its end and show it. Ctrl-C, SIGTERM and SIGHUP ask for a stop; a second one kills."""
    view = view_for(console, attempt.spec.iterations)
    say = _to_stderr if as_json else view.say
    pruner = Pruner(attempt.run_dir, attempt.spec.checkpoints)
    offset = _end_of_journal(attempt.segment)
    if not as_json:
        others = ", those of the other ranks beside it" if attempt.spec.training.ranks > 1 else ""
        console.print(
            f"run directory {attempt.run_dir}, log {attempt.log}{others}", markup=False, highlight=False, soft_wrap=True
        )
        found = estimate(attempt.spec)
        for warning in (*attempt.warnings, *found.warnings, *shortfalls(found, attempt.run_dir)):
            console.print(f"warning: {warning}", markup=False, highlight=False, soft_wrap=True)
    end: Event | None = None
    ended_at = 0.0
    rank_lost = False
    with contextlib.ExitStack() as stack:
        ranks = start_ranks(
            attempt.segment, attempt.number, size=attempt.spec.training.ranks, num_gpus=attempt.spec.resources.gpus
        )
        if not as_json:
            stack.enter_context(view)
        signals = stack.enter_context(_Signals(attempt, ranks, say))
        over = False
        while not over:
            exits = ranks.exits()  # looked at before the journal, so that its last lines are read
            events, offset = read_journal(attempt.segment.journal, offset)
            over = not events and all(exit.status is not None for exit in exits)
            for event in events:
                if as_json:
                    sys.stdout.write(encode_event(event))
                    sys.stdout.flush()
                else:
                    view.event(event.type, event.iteration, event.payload)
                if event.type == "checkpoint":
                    for damaged in pruner.prune():
                        say(f"damaged checkpoint: {damaged}")
                elif event.type == "end":
                    end, ended_at = event, time.monotonic()
            if not events and not over:
                rank_lost = rank_lost or (end is None and any(exit.breaks_group for exit in exits))
                if rank_lost:
                    ranks.end(LOST_GRACE_S)
                elif end is not None and time.monotonic() - ended_at > LEAVING_GRACE_S:
                    ranks.end(0)
                time.sleep(LOOK_EVERY_S)
        ranks.kill()  # what they may have started and left
    if rank_lost and not signals.asked and end is not None and end.payload["code"] == ExitCode.STOPPED:
        end = None  # Rank 0 obeyed the signal that ended it; nobody had asked for a stop.
    if end is None and signals.killed:
        _say(console, as_json, "killed; what was not saved is lost, and --resume goes on with the rest")
        return Exit.STOPPED
    return _outcome(attempt, end, exits, console, as_json)


def _checked(spec_file: Path, overrides: Sequence[str]) -> RunSpec:
    spec = parse_spec(read_spec_file(spec_file, overrides))
    faults = check_files(spec)
    if faults:
        raise SpecFaults(faults)
    return spec


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _Signals:
    """While in here, a signal asks the trainer to stop and a second one kills it."""

    def __init__(self, attempt: Attempt, ranks: RankGroup, say: Callable[[str], None]) -> None:
        self._attempt = attempt
        self._ranks = ranks
        self._say = say
        self.asked = False
        self.killed = False

    def __enter__(self) -> Self:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._before = {number: signal.signal(number, self._on_signal) for number in numbers}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._ranks.kill()
            self._ranks.wait()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.asked:
            self.killed = self._ranks.kill() or self.killed
            return
        self.asked = True
        # The command is for this attempt's token alone, so that it cannot stop the next one.
        number = self._attempt.number
        send_command(self._attempt.segment, ControlCommand(f"signal-{number}", "stop", number))
        self._say("stopping with a checkpoint; press Ctrl-C again to end at once without one")


def _outcome(attempt: Attempt, end: Event | None, exits: list[RankExit], console: Console, as_json: bool) -> Exit:
    fault = find_fault(attempt.segment, attempt.number, exits)
    if end is None or echoes_a_rank(end.payload, exits, fault):
        if fault is None:
            _say(console, as_json, _without_end(attempt, exits))
        else:
            _say_failed(console, as_json, fault.code, str(fault), fault.hint, fault.log)
        return Exit.FAILED
    code = int(end.payload["code"])
    error = end.payload.get("error")
    if error:
        became = "paused" if code == ExitCode.PAUSED else "failed"
        _say_failed(console, as_json, error["code"], error["message"], error.get("hint"), attempt.log, became)
    elif code == ExitCode.DONE:
        _say(console, as_json, f"succeeded: {end.iteration} iterations; checkpoints in {attempt.segment.checkpoints}")
    else:
        why = f": {end.payload['why']}" if end.payload.get("why") else ""
        _say(
            console,
            as_json,
            f"{end.payload['reason']} after iteration {end.iteration}{why}; to go on, repeat the command with "
            f"--resume --run-dir {attempt.run_dir}",
        )
    return of_trainer(code)


def _say(console: Console, as_json: bool, text: str) -> None:
    if as_json:
        _to_stderr(text)
    else:
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def _say_failed(
    console: Console, as_json: bool, code: str, message: str, hint: str | None, log: Path, became: str = "failed"
) -> None:
    _say(console, as_json, f"{became}: {code}: {message}")
    if hint:
        _say(console, as_json, f"  {hint}")
    _say(console, as_json, f"  log: {log}")


def _without_end(attempt: Attempt, exits: list[RankExit]) -> str:
    log = attempt.segment.log(attempt.number, first_lost(exits))
    return f"the trainer ended without a word ({describe_exits(exits)}); end of {log}:\n{end_of_log(log)}"


def _end_of_journal(segment: SegmentDir) -> int:
    offset = 0
    while True:
        events, offset = read_journal(segment.journal, offset)
        if not events:
            return offset


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.") or "run"


def _missing_run_dir(option: str) -> Path:
    raise SpecFaults([Fault("", f"{option} needs --run-dir: the folder of the run to go on with")])


def _refuse_used(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or not is_unused(folder)):
        raise SpecFaults(
            [
                Fault(
                    "", f"--run-dir {folder} is not empty: go on with the run in it by --resume, or give another folder"
                )
            ]
        )


def _damaged(folder: Path) -> dict[Path, str]:
    """Of the newest segment the checkpoints behind its newest good one, and what is wrong with each."""
    found: dict[Path, str] = {}
    for newest in segments(folder)[-1:]:
        for path in reversed(checkpoints(newest)):
            try:
                verify_checkpoint(path, journalled_digest(path))
                break
            except CheckpointError as error:
                found[path] = str(error)
    return found


def _start_again(folder: Path, spec: RunSpec, damaged: Collection[Path]) -> SegmentStart | None:
    """What a resumed run has to run; None when it has reached its end."""
    try:
        start = next_start(folder, damaged)
    except RunDirectoryError as error:
        raise SpecFaults(
            [Fault("", f"--run-dir {folder} has nothing to resume: {error}; leave out --resume")]
        ) from error
    changed = sorted(_differences(with_defaults(start.spec), spec.model_dump(mode="json")))
    if changed:
        raise SpecFaults(
            [
                Fault(pointer, "differs from the run's own spec, and a resumed run keeps it; undo it")
                for pointer in changed
            ]
        )
    last = next(iter(deque(all_events(segments(folder)[-1].journal), maxlen=1)), None)
    if last is not None and last.type == "end" and last.payload.get("code") == ExitCode.DONE:
        return None
    return start


def _differences(old: Any, new: Any, pointer: str = "") -> Iterator[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted({*old, *new}):
            yield from _differences(old.get(key), new.get(key), f"{pointer}/{key}")
    elif old != new:
        yield pointer
