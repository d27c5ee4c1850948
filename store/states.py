"""States of a run and the moves between them: one map, used by code and by the database's constraint.

States say what a run *is*. What is asked of it is a row of `commands`.
"""

from __future__ import annotations

from typing import Literal, get_args

State = Literal[
    "queued", "starting", "running", "pausing", "paused", "stopping", "killing", "stopped", "cancelled",
    "recovering", "failed", "succeeded",
]  # fmt: skip
STATES: tuple[str, ...] = get_args(State)
TERMINAL: frozenset[str] = frozenset({"stopped", "cancelled", "failed", "succeeded"})
AT_REST: frozenset[str] = TERMINAL | {"paused"}
LIVE: frozenset[str] = frozenset({"starting", "running", "pausing", "stopping", "killing"})

COMMAND_STATUSES: tuple[str, ...] = ("pending", "delivered", "acked", "done", "failed", "superseded", "timed_out")

# from -> to. A terminal state is left only by a user's retry, resume or roll back, never by anything automatic.
MOVES: dict[str, frozenset[str]] = {
    "queued": frozenset({"starting", "stopped", "cancelled"}),
    "starting": frozenset({"running", "stopping", "killing", "recovering", "failed"}),
    # Stopped or paused by itself: a gate or guard tripped, or it cannot go on as the machine stands.
    "running": frozenset({"pausing", "stopping", "killing", "succeeded", "stopped", "paused", "recovering", "failed"}),
    # A run that shall pause or stop may come to an end of its own first: its goal, a fault, a gate. It is running
    # again when the pause's deadline passed and the request was withdrawn.
    "pausing": frozenset({"paused", "running", "stopping", "killing", "recovering", "failed", "succeeded", "stopped"}),
    "paused": frozenset({"queued", "stopped", "cancelled"}),
    "stopping": frozenset({"stopped", "queued", "killing", "recovering", "failed", "succeeded"}),
    # Whoever ends the processes may be lost meanwhile; then the reconciler ends them.
    "killing": frozenset({"cancelled", "recovering"}),
    # A stop or kill that was asked is carried out instead of another attempt, and a gate that had tripped stays so.
    "recovering": frozenset({"queued", "failed", "stopped", "cancelled"}),
    "stopped": frozenset({"queued"}),
    "cancelled": frozenset({"queued"}),
    "failed": frozenset({"queued"}),
    "succeeded": frozenset({"queued"}),
}
