"""Going back in a run directory with no platform: which checkpoint is meant, and the segment that starts from it."""

from __future__ import annotations

import re
from pathlib import Path

from ppo_core.errors import CheckpointError, RunDirectoryError
from ppo_core.rundir import (
    JournalWriter,
    SegmentDir,
    SegmentStart,
    checkpoint_iteration,
    checkpoints,
    journalled_digest,
    line_to,
    segments,
    verify_checkpoint,
)
from ppo_core.spec import (
    Fault,
    RunSpec,
    SpecFaults,
    differences,
    misfits_with_checkpoint,
    refusals,
    too_few_iterations,
    with_defaults,
)


def rollback_start(folder: Path, spec: RunSpec, text: str) -> SegmentStart:
    """What to run when the run in `folder` goes back to the checkpoint that `text` names: `20`, or `2:20`.

    Raises:
        SpecFaults: there is no such checkpoint, it is damaged, or `spec` changes what may not change.
    """
    folder = folder.resolve()
    every = {one.read_start().segment: one for one in segments(folder)}
    if not every:
        raise _fault(f"--run-dir {folder} holds no run to go back in; leave out --rollback")
    number, iteration = _place(every, text)
    target = every[number].checkpoint(iteration) if number in every else None
    if target is None or target not in checkpoints(every[number]):
        there = ", ".join(f"{each}:{checkpoint_iteration(path)}" for each in every for path in checkpoints(every[each]))
        raise _fault(f"--rollback {text}: there is no such checkpoint; there are {there or 'none'}")
    try:
        verify_checkpoint(target, journalled_digest(target))
        JournalWriter(every[max(every)].journal).close()  # refused while a trainer is at work
    except (CheckpointError, RunDirectoryError) as error:
        raise _fault(f"--rollback {text}: {error}") from error
    _check_changes(spec, every[number], iteration)
    return SegmentStart(folder.name, max(every) + 1, spec.model_dump(mode="json"), str(target))


def _place(every: dict[int, SegmentDir], text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(?:(\d{1,6}):)?(\d{1,9})", text)
    if match is None:
        raise _fault(f"--rollback {text!r}: write an iteration, 20, or segment and iteration, 2:20")
    iteration = int(match[2])
    if match[1] is not None:
        return int(match[1]), iteration
    number = max(every)
    for piece in line_to(every[number]):  # back along the present history, to the segment that reached it
        number = piece.segment.number
        if iteration > piece.start:
            break
    return number, iteration


def _check_changes(spec: RunSpec, segment: SegmentDir, iteration: int) -> None:
    kept = with_defaults(segment.read_start().spec)
    faults = refusals(differences(kept, spec.model_dump(mode="json")), {}, fork=False)
    faults += [Fault(pointer, message) for pointer, message in misfits_with_checkpoint(spec, kept).items()]
    too_few = too_few_iterations(spec.iterations, iteration)
    if too_few is not None:
        faults.append(Fault("/iterations", too_few))
    if faults:
        raise SpecFaults(faults)


def _fault(message: str) -> SpecFaults:
    return SpecFaults([Fault("", message)])
