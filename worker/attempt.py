"""One attempt at a run: its trainer, and what was seen and decided of it so far."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from ppo_core.rundir import RankExit, SegmentDir, echoes_a_rank, find_fault, withdraw_command
from store.commands import WITHDRAWN_LATE
from worker.attempt_view import AttemptView
from worker.delivery import Delivery
from worker.outcome import EndedBy, Outcome, from_end, from_fault, stopped_unasked, without_end
from worker.prune import Pruner
from worker.trainer_process import TrainerProcesses

log = logging.getLogger("worker.supervise")

# What a trainer that has gone left running.
CHILDREN_GRACE_S = 2.0


@dataclass
class Attempt:
    """A started trainer, and what belongs to it."""

    number: int
    segment: SegmentDir
    view: AttemptView
    delivery: Delivery
    pruner: Pruner
    trainer: TrainerProcesses
    exits: list[RankExit] = field(default_factory=list)
    ended_by: EndedBy | None = None
    why: str | None = None
    left_at: float | None = None
    pruned_at: int | None = None

    def end(self, by: EndedBy, why: str) -> None:
        """From now on the trainer is being ended."""
        log.warning("ending the trainer: %s", why)
        self.ended_by, self.why = by, why

    def withdraw(self, command_id: str, kind: str, token: int) -> bool:
        """Take back a request that came to its deadline, and that nothing is lost without: False where it cannot be.

        A save under way is waited for, however late. What is more severe has an escalation instead: a trainer that does
        not stop in time is ended.
        """
        if kind not in WITHDRAWN_LATE or self.view.phase == "saving" or self.view.end or self.ended_by:
            return False
        withdraw_command(self.segment, command_id, token)
        return True

    def over(self) -> bool:
        """Whether the trainer and all it started are gone. What it left behind when it went is ended here."""
        self.exits = self.trainer.exits()  # looked at before the journal, so that a last word is never overlooked
        self.view.read()
        return self.trainer.all_left() and self.trainer.end(CHILDREN_GRACE_S)

    def outcome(self, draining: bool, asked_to_stop: bool) -> Outcome:
        """What became of it."""
        end, exits = self.view.end, self.trainer.exits()
        fault = find_fault(self.segment, self.number, exits) if self.ended_by in (None, "rank_lost") else None
        if end is not None and not (
            stopped_unasked(end, self.ended_by, asked_to_stop or draining) or echoes_a_rank(end, exits, fault)
        ):
            return from_end(end, self.view.saved_iteration, draining)
        return from_fault(fault) if fault is not None else without_end(exits, self.ended_by, self.why, draining)
