"""Which checkpoint a user means: an id, `220` on the present line, `2:220` in segment 2, or `last-good`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ppo.client import Client, ClientError
from ppo.wire import Checkpoint, Segment

LAST_GOOD = "last-good"
MEANINGS = f"an id, 220 (iteration on the present line), 2:220 (segment:iteration), or {LAST_GOOD}"


class NoSuchCheckpointError(ClientError):
    """The run has no such checkpoint; the message says which could be meant."""


def find_checkpoint(client: Client, run_id: str, text: str) -> Checkpoint:
    """The checkpoint of this run that `text` names. One that was removed is found by its id alone.

    Raises:
        NoSuchCheckpointError
    """
    every = client.checkpoints(run_id)
    for checkpoint in every:
        if checkpoint["id"] == text:
            return checkpoint
    present = [checkpoint for checkpoint in every if checkpoint["status"] != "removed"]
    if text == LAST_GOOD:
        line = client.segments(run_id)
        good = [c for c in present if c["status"] == "good" and is_on_line(c, line)]
        if not good:
            raise NoSuchCheckpointError("the run has no good checkpoint on its present line")
        return max(good, key=lambda checkpoint: (checkpoint["segment"], checkpoint["iteration"]))
    if match := re.fullmatch(r"(\d+):(\d+)", text):
        segment, iteration = int(match[1]), int(match[2])
        found = [c for c in present if (c["segment"], c["iteration"]) == (segment, iteration)]
    elif text.isdecimal():
        line = client.segments(run_id)
        found = [c for c in present if c["iteration"] == int(text) and is_on_line(c, line)]
    else:
        found = [checkpoint for checkpoint in present if text and checkpoint["id"].startswith(text)]
    if len(found) == 1:
        return found[0]
    raise NoSuchCheckpointError(_sentence(text, found, present))


def place(checkpoint: Checkpoint) -> str:
    """`2:220`, which names it in every command."""
    return f"{checkpoint['segment']}:{checkpoint['iteration']}"


def is_on_line(checkpoint: Checkpoint, segments: Sequence[Segment]) -> bool:
    """Whether the run's present history goes through the checkpoint."""
    for segment in segments:
        if segment["number"] == checkpoint["segment"] and segment["on_active_line"] is not None:
            first, last = segment["on_active_line"]
            return first <= checkpoint["iteration"] <= last
    return False


def _sentence(text: str, found: Sequence[Checkpoint], present: Sequence[Checkpoint]) -> str:
    if found:
        return f"{text!r} fits several checkpoints: {', '.join(c['id'] for c in found)}"
    beside = [place(c) for c in present if text.isdecimal() and c["iteration"] == int(text)]
    if beside:
        return f"the present line has no checkpoint at iteration {text}; beside it there is {', '.join(beside)}"
    newest = ", ".join(place(checkpoint) for checkpoint in present[-5:]) or "none"
    return f"there is no checkpoint {text!r}: give {MEANINGS}; there are {newest}"
