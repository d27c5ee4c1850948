"""Puts right what the dead left behind: `python -m worker.reconcile`, a process of its own.

Every few seconds: leases that ran out make their runs `recovering`, and once the processes of the lost attempt are
proved gone the run is queued again, or failed. Silent workers are gone, stray slots are freed, commands that nobody
takes up time out, and the files of deleted checkpoints go. Twice a second: runs that nobody holds go back to the
checkpoints that they were asked to. Any number may run; an advisory lock lets one of them work, and is lost by one
that shows no sign of life for a lease. Should that one come back in the middle of something, nothing is done twice:
every move is fenced by the run's token and state. A thread beside it sends what waits for webhooks (`worker.webhooks`).
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from psycopg.errors import IdleSessionTimeout
from sqlalchemy import Connection, func, select, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session, sessionmaker

from ppo_core.rundir import ExitCode, SegmentDir, segment_dir
from store import leases, recovery, workers
from store.commands import time_out_unattended
from store.models import Run, Worker
from store.runs import IllegalMove, LeaseLost, locked_run, transition
from store.session import AWAY, STILL_S, describe, is_served, make_engine, session_factory
from worker.agreement import adopt_checkpoints
from worker.attempt_view import last_word
from worker.clock_watch import ClockWatch
from worker.data_folder import data_folder_fault
from worker.delivery import Delivery
from worker.housekeeping import Housekeeping
from worker.outcome import from_end, write_outcome
from worker.processes import kill_marked
from worker.resting_rollbacks import RestingRollbacks
from worker.settings import WorkerSettings, settings_or_exit
from worker.webhooks import WebhookSender

log = logging.getLogger("worker.reconcile")

_LOCK = 7_370_002
ROLLBACK_EVERY_S = 0.5
LEAST_HOLD_S = 5.0  # A busy machine keeps one from its sign of life for seconds.
# Ends that a new attempt would only repeat. Others are: a goal is reached again at once from the last checkpoint.
FINAL_CODES = (ExitCode.BAD_SPEC, ExitCode.DATA_OR_REWARD, ExitCode.FAULT, ExitCode.GATE_OR_GUARD)


class Reconciler:
    """One look after the other, as long as it holds the lock."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.engine = make_engine(settings.database_url, pool_size=2, still_s=STILL_S)
        self.sessions: sessionmaker[Session] = session_factory(self.engine)
        self.housekeeping = Housekeeping(self.sessions, settings)
        self.stopping = threading.Event()
        self._holder: Connection | None = None
        self._trust_leases_from = 0.0
        # Who renews in time has half a lease left, so a smaller jump ends none.
        self._clock = ClockWatch(settings.lease_s / 2)
        self.rollbacks = RestingRollbacks(self.sessions, settings.data_dir.absolute() / "runs")

    def run(self) -> None:
        """Look until told to stop."""
        while not self.stopping.is_set():
            try:
                if self._holds_lock() and self._has_the_right_folder():
                    self.look()
                    self._roll_back_until_next_look()
                else:
                    self.stopping.wait(self._pause_s)
            except AWAY as error:
                log.warning("%s", describe(error))
                if not is_served(error):
                    self._let_go()
                    # Replaying its log may have taken Postgres longer than a lease: supervisors get time to renew.
                    self._trust_leases_from = time.monotonic() + self.settings.lease_s
                self.stopping.wait(self._pause_s)
        self._let_go()
        self.engine.dispose()

    def _has_the_right_folder(self) -> bool:
        """Whether it may decide by files. Without any it can: what lies there is told by the next attempt."""
        folder = self.settings.data_dir
        fault = data_folder_fault(self.sessions, folder, "the reconciler") if folder.is_dir() else None
        if fault is not None:
            log.error("nothing is looked after: %s", fault)
        return fault is None

    @property
    def _pause_s(self) -> float:
        return min(self.settings.poll_s, self.settings.lease_s / 4)

    def _roll_back_until_next_look(self) -> None:
        """People wait for these, so they are looked for more often than what the dead left behind."""
        next_look = time.monotonic() + self._pause_s
        while not self.stopping.is_set() and time.monotonic() < next_look:
            for run_id, command_id in self.rollbacks.waiting():
                self._for_one(run_id, partial(self.rollbacks.carry_out, run_id, command_id))
            self.stopping.wait(min(ROLLBACK_EVERY_S, self._pause_s))

    def look(self) -> None:
        """Everything once. A fault with one run does not keep the others waiting."""
        with self.sessions.begin() as session:
            ended = leases.end_still_sessions(session, max(self.settings.lease_s, 2 * STILL_S))
        if ended:
            log.warning("%d database sessions stood still in a transaction and were ended", ended)
        if time.monotonic() >= self._trust_leases_from:
            self._end_leases()
        with self.sessions() as session:
            lost = session.execute(
                select(Run.id, Run.lease_token, Run.active_segment).where(Run.state == "recovering")
            ).all()
        for run_id, token, segment in lost:
            self._for_one(run_id, partial(self._recover, run_id, token, segment))
        with self.sessions.begin() as session:
            for worker_id in workers.mark_silent(session, self.settings.lease_s + 2 * self.settings.poll_s):
                log.warning("worker %s is gone", worker_id)
        # One transaction each: whoever waits for a run's row here keeps no worker from its own.
        with self.sessions.begin() as session:
            freed = workers.free_stray_slots(session)
            if freed:
                log.error("freed %d slots that no run held", freed)
        with self.sessions.begin() as session:
            time_out_unattended(session)
        self.housekeeping.look()

    def _end_leases(self) -> None:
        """Declare lost who let a lease run out; after a jump of the clock everybody gets a new one instead."""
        with self.sessions() as session:
            overdue = leases.expired(session, self.settings.lease_s)
            # Asked after the leases, so that no jump comes between: one after both is a reason to wait, too.
            jump_s = self._clock.jumped(session.execute(select(func.clock_timestamp())).scalar_one())
            live = leases.live(session) if jump_s is not None else []
        if jump_s is not None:
            log.warning("the database's clock jumped by %.0f s: %d leases begin anew", jump_s, len(live))
            for run_id, token in live:
                self._for_one(run_id, partial(self._renew, run_id, token))
            return
        for run_id, token in overdue:
            self._for_one(run_id, partial(self._declare_lost, run_id, token))

    def _renew(self, run_id: str, token: int) -> None:
        with self.sessions.begin() as session:
            leases.renew(session, run_id, token, self.settings.lease_s)

    def _for_one(self, run_id: str, work: Callable[[], object]) -> None:
        try:
            work()
        except (LeaseLost, IllegalMove) as error:
            log.info("run %s moved meanwhile: %s", run_id, error)
        except AWAY as error:
            if not is_served(error):
                raise
            log.warning("run %s is looked at again: %s", run_id, describe(error))
        except Exception:
            log.exception("run %s", run_id)

    def _declare_lost(self, run_id: str, token: int) -> None:
        with self.sessions.begin() as session:
            if leases.end_stuck_sessions(session, run_id, token):
                log.warning("run %s: its supervisor stood still in a transaction, which was ended", run_id)
        with self.sessions.begin() as session:
            run = session.get_one(Run, run_id)
            worker = session.get(Worker, run.lease_worker) if run.lease_worker else None
            where = f" on {worker.host}" if worker else ""
            detail = f"supervisor{where} was silent for more than {self.settings.lease_s:g} s"
            transition(
                session, run_id, "recovering", expect_token=token, reason_code="supervisor_lost", reason_detail=detail
            )
        log.warning("run %s: %s", run_id, detail)

    def _recover(self, run_id: str, token: int, segment: int) -> None:
        """End what is left of the attempt here, deliver its journal, and decide.

        On another machine the trainer died with its supervisor by the kernel's word, and the next claim there looks
        for left-overs before it starts.
        """
        left = kill_marked(run_id, token)
        if left:
            log.error("run %s: processes %s cannot be ended; it stays recovering", run_id, left)
            return
        folder = segment_dir(self.settings.run_dir(run_id), segment)
        end = self._settle_files(run_id, token, segment, folder)
        with self.sessions.begin() as session:
            locked_run(session, run_id, expect_token=token)
            if end is not None and end.get("code") in FINAL_CODES:
                # The trainer had said it all; only the supervisor could no longer write it down.
                write_outcome(session, run_id, token, from_end(end, None, draining=False))
                return
            run = session.get_one(Run, run_id)
            run = recovery.settle(
                session,
                run_id,
                expect_token=token,
                code=run.reason_code or "supervisor_lost",
                detail=run.reason_detail or "the supervisor was lost",
                hint=run.hint,
            )
            log.warning("run %s is %s again", run_id, run.state)

    def _settle_files(self, run_id: str, token: int, segment: int, folder: SegmentDir) -> dict[str, Any] | None:
        """Bring what the attempt left in its folder to the database; returns its last word, if it left one.

        Whatever is wrong with the files, the run does not stay `recovering` for that: the next attempt meets it.
        """
        end = None
        try:
            Delivery(self.sessions, run_id, segment, folder).all(token)
            end = last_word(folder, token)
            with self.sessions.begin() as session:
                locked_run(session, run_id, expect_token=token)
                adopt_checkpoints(session, run_id, segment, folder, token)
        except (*AWAY, LeaseLost):
            raise
        except Exception:
            log.exception("run %s: what the lost attempt left cannot be taken up", run_id)
        return end

    def _holds_lock(self) -> bool:
        """Take the lock, or show a sign of life to the server, which ends the session that holds it without one."""
        if self._holder is None or self._holder.invalidated:
            self._let_go()
            self._holder = self.engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            hold_s = max(self.settings.lease_s, LEAST_HOLD_S)
            self._holder.execute(text(f"SET idle_session_timeout = {round(hold_s * 1000)}"))
        try:
            held = self._holder.scalar(
                text(
                    "SELECT CASE WHEN EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory'"
                    " AND pid = pg_backend_pid() AND objid = :key) THEN true ELSE pg_try_advisory_lock(:key) END"
                ),
                {"key": _LOCK},
            )
        except OperationalError as error:
            if not isinstance(error.orig, IdleSessionTimeout):
                raise
            log.warning("the lock was lost: one look took longer than a lease, or this process stood still")
            self._let_go()
            return False
        return bool(held)

    def _let_go(self) -> None:
        if self._holder is not None:
            # A pooled connection would keep the lock: this one is closed for good.
            self._holder.invalidate()
            self._holder.close()
            self._holder = None


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout)
    # It tells whole addresses, and those of webhooks may hold secrets.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    settings = settings_or_exit()
    reconciler, sender = Reconciler(settings), WebhookSender(settings)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: reconciler.stopping.set())
    sender.start()
    reconciler.run()
    sender.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
