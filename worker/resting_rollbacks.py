"""Carries out roll backs of runs that nobody holds: at rest, or waiting in the queue."""

from __future__ import annotations

import logging
from pathlib import Path

from sqlalchemy import func, select
from sqlalchemy.orm import Session, sessionmaker

from store.models import Command
from store.rollback import UNHELD, go_back, open_rollback, resting_rollbacks
from store.runs import locked_run
from worker.target_check import TargetChecks

log = logging.getLogger("worker.reconcile")


class RestingRollbacks:
    """Ask often: a comparison is begun at the first time, and what it found is acted on at a later one."""

    def __init__(self, sessions: sessionmaker[Session], runs: Path) -> None:
        self._sessions = sessions
        self._runs = runs
        self._checks = TargetChecks()

    def waiting(self) -> list[tuple[str, str]]:
        """(run, command) of each."""
        with self._sessions() as session:
            return resting_rollbacks(session)

    def carry_out(self, run_id: str, command_id: str) -> bool:
        """Go one step on with one; True when its run went back."""
        with self._sessions.begin() as session:
            run = locked_run(session, run_id)
            asked = open_rollback(session, run_id)
            if asked is None or asked.command.id != command_id or run.state not in UNHELD:
                return False
            left = func.extract("epoch", Command.deadline_at - func.clock_timestamp())
            remaining_s = float(session.scalar(select(left).where(Command.id == command_id)) or 0)
            if not self._checks.settled(session, asked, self._runs / run_id, remaining_s):
                return False
            went = go_back(session, run_id, asked) is not None
        if went:
            log.info("run %s went back: %s", run_id, command_id)
        return went
