"""Looks after one run from its claim to its rest: `python -m worker.supervise RUN_ID TOKEN`.

It starts the trainer's ranks, renews the lease, hands commands over, brings the journal to Postgres, ends what does not
end by itself, proves every process gone, and only then writes what became of the run. While Postgres is away the
trainer trains on; everything is delivered when it is back. If the supervisor dies, the kernel kills its trainer.

One thread, one loop: nothing here takes long but a commit, and a trainer needs no attention for seconds.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar, cast

from sqlalchemy import func, select
from sqlalchemy.orm import Session, sessionmaker

from ppo_core.errors import CheckpointError, PPOCoreError, RunDirectoryError
from ppo_core.rundir import (
    LEAVING_GRACE_S,
    LOST_GRACE_S,
    CommandKind,
    ControlCommand,
    describe_exits,
    device_names,
    free_port,
    num_ranks,
    rank_environment,
    send_command,
)
from store import leases
from store.checkpoints import longest_comparison_s, record_verification
from store.commands import finish_late, mark_acked, mark_delivered, open_commands
from store.models import Command, Run
from store.queue import held_gpus
from store.retention import rules_of
from store.rollback import open_rollback
from store.runs import LeaseLost, RunNotFound, locked_run, transition
from store.session import AWAY, STILL_S, describe, make_engine, session_factory
from worker.attempt import Attempt
from worker.attempt_view import AttemptView
from worker.delivery import Delivery
from worker.outcome import EndedBy, Outcome, without_files, write_outcome
from worker.processes import kill_marked
from worker.prune import Pruner
from worker.segment_start import KilledBeforeStart, Prepared, loaded_checkpoint, prepare
from worker.settings import WorkerSettings, settings_or_exit
from worker.target_check import TargetCheck, TargetChecks
from worker.trainer_process import RankStart, TrainerProcesses

log = logging.getLogger("worker.supervise")
T = TypeVar("T")

TICK_S = 0.1
# How late a command may reach the trainer; asking more often only costs processor time.
ATTEND_EVERY_S = 0.25
# From SIGTERM to SIGKILL, by what made the supervisor end the trainer.
TERM_GRACE_S: dict[EndedBy, float] = {
    "deadline": 10.0,
    "stalled": 10.0,
    # A trainer that is loading has nothing to save: it may go at once.
    "loading_stop": 0.5,
    "rank_lost": LOST_GRACE_S,
    # Long enough for an engine to give its GPU back, too short for a checkpoint: nobody wants one.
    "kill": 1.0,
}
AWAY_PAUSE_S = 1.0


class Supervisor:
    """One claim of one run."""

    def __init__(self, settings: WorkerSettings, run_id: str, token: int) -> None:
        self.settings = settings
        self.run_id = run_id
        self.token = token
        self.run_dir = settings.run_dir(run_id)
        name = leases.session_name(run_id, token)
        self.engine = make_engine(settings.database_url, pool_size=2, name=name, still_s=STILL_S)
        self.sessions: sessionmaker[Session] = session_factory(self.engine)
        self.draining = False
        self._drain_until: float | None = None
        self._drain_sent = False
        self._drain_told = False
        self._stop_until: float | None = None
        self._back_until: float | None = None
        self._killed = False
        self._checks = TargetChecks()
        self._handed_over: dict[str, str] = {}
        self._complained: set[str] = set()
        self._renew_at = 0.0
        self._look_at = 0.0
        self._is_away = False

    def run(self) -> int:
        """From claim to rest; the exit status is for people who read process lists."""
        attempt = None
        try:
            # Before the journal's end is looked for: whoever is left here might still write to it.
            left = kill_marked(self.run_id, self.token - 1)
            if left:
                raise RunDirectoryError(f"processes {left} of an earlier attempt are still there and cannot be ended")
            prepared = self._patiently(self._prepare)
            attempt = self._start(prepared)
            self._look_after(attempt)
            asked = self._stop_until is not None or self._back_until is not None
            outcome = attempt.outcome(self.draining and self._back_until is None, asked)
            if outcome.kind == "failed" and outcome.code == CheckpointError.code and not attempt.view.started:
                outcome = self._blame_checkpoint(prepared, outcome)
        except KilledBeforeStart:
            outcome = Outcome("cancelled", "killed")
        except (LeaseLost, RunNotFound) as lost:
            # Somebody else decides about the run now, and must not meet our trainer.
            log.warning("left the run alone: %s", lost)
            if attempt is not None:
                self._end_now(attempt)
                self._tell_the_last(attempt)
            return 3
        except PPOCoreError as error:
            log.error("the run cannot go on: %s", error)
            outcome = Outcome("failed", error.code, str(error), error.hint)
        except OSError as error:
            log.error("the run cannot go on: %s", error)
            outcome = without_files(error, attempt is not None)
        except Exception as error:
            log.exception("fault of the supervisor")
            hint = "This is a fault of the platform; the supervisor's log lies in the run's folder."
            outcome = Outcome("lost", "supervisor_fault", f"{type(error).__name__}: {error}", hint)
        if attempt is not None:
            self._end_now(attempt)
        return self._rest(attempt, outcome)

    def _blame_checkpoint(self, prepared: Prepared, outcome: Outcome) -> Outcome:
        """A trainer could not load its checkpoint. If that is damaged the run goes on from an older one by itself."""
        found = self._patiently(lambda: loaded_checkpoint(self.sessions, prepared, self.run_dir))
        if found is None:
            return outcome
        check = TargetCheck(self.run_dir.parent / found.run_id, found.path, found.manifest_sha256)
        late_at = time.monotonic() + longest_comparison_s(found.bytes)
        while not check.finished:
            self._patiently(self._renew)
            if self.draining or self._patiently(self._asked_to_end):
                why = (
                    f"checkpoint {found.id} could not be loaded, and there was no time to compare it with its manifest"
                )
                return Outcome("lost", "checkpoint", why)
            if time.monotonic() > late_at:
                return outcome
            time.sleep(ATTEND_EVERY_S)
        fault = check.fault
        if fault is None or not check.damaged:
            return outcome

        def tell() -> None:
            with self.sessions.begin() as session:
                record_verification(session, found.run_id, found.id, fault)

        self._patiently(tell)
        return Outcome("lost", "checkpoint_damaged", f"checkpoint {found.id} could not be loaded: {fault}")

    def _asked_to_end(self) -> bool:
        with self.sessions() as session:
            return any(command.kind in ("stop", "kill") for command in open_commands(session, self.run_id))

    def drain(self, signum: int = 0, frame: FrameType | None = None) -> None:
        """Save, stop, and put the run back into the queue."""
        self.draining = True

    # Start

    def _prepare(self) -> Prepared:
        return prepare(self.sessions, self.run_id, self.token, self.run_dir, os.getpid())

    def _held_gpus(self) -> tuple[int, ...]:
        with self.sessions() as session:
            return held_gpus(session, self.run_id)

    def _start(self, prepared: Prepared) -> Attempt:
        segment, start, number = prepared.folder, prepared.start, prepared.attempt
        view = AttemptView(segment)
        devices = device_names(self._patiently(self._held_gpus), os.environ.get("CUDA_VISIBLE_DEVICES"))
        size, port = num_ranks(start.spec), free_port()
        words = [*self.settings.trainer_words, str(segment.path), "--token", str(self.token)]
        words += ["--attempt", str(number)]
        ranks = [
            RankStart(segment.log(number, rank), rank_environment(rank, size, port, devices)) for rank in range(size)
        ]
        trainer = TrainerProcesses(words, self.run_id, self.token, ranks)
        log.info("attempt %d: trainer %s in %s", number, " ".join(map(str, trainer.pids)), segment.path)
        pruner = Pruner(self.sessions, self.run_id, self.token, self.run_dir, rules_of(start.spec))
        pruner.look()
        return Attempt(
            number,
            segment,
            view,
            Delivery(self.sessions, self.run_id, start.segment, segment),
            pruner,
            trainer,
        )

    # The loop

    def _look_after(self, attempt: Attempt) -> None:
        while not attempt.over():
            self._database(lambda: self._attend(attempt))
            self._decide(attempt)
            time.sleep(TICK_S)
        attempt.view.read()

    def _attend(self, attempt: Attempt) -> None:
        """What needs the database: the lease, the journal, the commands."""
        self._renew()
        attempt.delivery.step(self.token)
        with self.sessions.begin() as session:
            self._take_commands(session, attempt)
            if self._drain_sent and not self._drain_told:
                state = locked_run(session, self.run_id, expect_token=self.token).state
                if state in ("starting", "running"):
                    transition(session, self.run_id, "stopping", expect_token=self.token, reason_code="drain")
                self._drain_told = True
        saved = attempt.view.saved_iteration
        if saved != attempt.pruned_at:
            attempt.pruned_at = saved
            attempt.pruner.look()

    def _renew(self) -> None:
        now = time.monotonic()
        if now >= self._renew_at:
            with self.sessions.begin() as session:
                leases.renew(session, self.run_id, self.token, self.settings.lease_s)
            self._renew_at = now + self.settings.renew_s

    def _take_commands(self, session: Session, attempt: Attempt) -> None:
        """Hand open commands to the trainer, and notice by when a stop has to be done."""
        remaining = func.extract("epoch", Command.deadline_at - func.clock_timestamp())
        rows = session.execute(
            select(Command.id, Command.kind, Command.status, remaining, Run.state)
            .join(Run, Run.id == Command.run_id)
            .where(Command.run_id == self.run_id, Command.finished_at.is_(None))
            .order_by(Command.created_at, Command.id)
        ).all()
        if all(kind != "rollback" for _, kind, *_ in rows):
            self._back_until = None  # withdrawn by a stop, which has a deadline of its own
        for command_id, kind, status, remaining_s, state in rows:
            if kind == "rollback":
                self._take_rollback(session, attempt, state, float(remaining_s))
                continue
            if kind == "kill":
                if not self._killed:
                    mark_delivered(session, command_id)
                    mark_acked(session, command_id, "its processes are being ended")
                self._killed = True
                continue
            if remaining_s <= 0 and attempt.withdraw(command_id, kind, self.token):
                finish_late(session, self.run_id, self.token, command_id, attempt.view.phase)
                self._handed_over.pop(command_id, None)
                continue
            if kind == "stop":
                self._stop_until = time.monotonic() + float(remaining_s)
            if kind == "pause" and state == "running":  # asked of an earlier attempt
                transition(session, self.run_id, "pausing", expect_token=self.token, reason_code="pause")
            if command_id in self._handed_over:
                continue
            if not self._hand_over(attempt, command_id, cast(CommandKind, kind)):
                continue
            self._handed_over[command_id] = kind
            if status == "pending":
                mark_delivered(session, command_id)
            if kind == "stop" and not attempt.view.started:
                mark_acked(session, command_id)  # for a trainer that cannot yet hear it and is ended instead

    def _take_rollback(self, session: Session, attempt: Attempt, state: str, remaining_s: float) -> None:
        """Once its checkpoint is known to be whole, have the trainer save and stop; until then the run goes on."""
        asked = open_rollback(session, self.run_id)
        if asked is None or asked.command.id in self._handed_over:
            return
        if not self._checks.settled(session, asked, self.run_dir, remaining_s):
            return
        if state in ("starting", "running", "pausing"):
            transition(session, self.run_id, "stopping", expect_token=self.token, reason_code="rollback")
        self._back_until = self._back_until or time.monotonic() + self.settings.rollback_stop_s
        if self._hand_over(attempt, asked.command.id, "stop"):
            self._handed_over[asked.command.id] = "rollback"

    def _hand_over(self, attempt: Attempt, command_id: str, kind: CommandKind) -> bool:
        """Leave a command for the trainer; False where the disk takes none, to be tried again.

        What is urgent has a deadline, and then a signal that needs no disk.
        """
        try:
            send_command(attempt.segment, ControlCommand(command_id, kind, self.token))
        except OSError as error:
            if command_id not in self._complained:
                log.error("%s cannot be handed over: %s", command_id, error)
            self._complained.add(command_id)
            return False
        return True

    def _decide(self, attempt: Attempt) -> None:
        """What needs no database: begin to drain, and end a trainer whose time is over."""
        now = time.monotonic()
        if self.draining:
            self._drain_until = self._drain_until or now + self.settings.drain_s
            # A run that pauses or stops comes to rest with a checkpoint anyway, unless its pause is withdrawn.
            if not self._drain_sent and not {"pause", "stop", "rollback"} & set(self._handed_over.values()):
                self._drain_sent = self._hand_over(attempt, f"drain-{self.token}", "stop")
        if self._killed and attempt.ended_by != "kill":
            attempt.end("kill", "a kill was asked")
        if attempt.ended_by is not None:
            attempt.trainer.end(TERM_GRACE_S[attempt.ended_by])
        elif attempt.view.end is not None:
            attempt.left_at = attempt.left_at or now
            if now - attempt.left_at > LEAVING_GRACE_S:
                attempt.trainer.end(0)
        elif any(exit.breaks_group for exit in attempt.exits) and not attempt.trainer.all_left():
            attempt.end("rank_lost", f"the others cannot go on ({describe_exits(attempt.exits)})")
        elif (self._stop_until or self._drain_until or self._back_until) and not attempt.view.started:
            attempt.end("loading_stop", "it was loading when it was asked to stop")
        elif self._stop_until is not None and now > self._stop_until:
            attempt.end("deadline", "the trainer did not stop by the command's deadline and was ended")
        elif self._back_until is not None and now > self._back_until:
            patience_s = self.settings.rollback_stop_s
            attempt.end("deadline", f"the trainer did not stop for the roll back within {patience_s:.0f} s")
        elif self._drain_until is not None and now > self._drain_until:
            attempt.end("deadline", f"the trainer did not save within {self.settings.drain_s:.0f} s and was ended")
        elif (why := attempt.view.stalled()) is not None:
            attempt.end("stalled", why)

    def _end_now(self, attempt: Attempt) -> None:
        """Leave no process behind, whatever happened."""
        while not attempt.trainer.end(0):
            time.sleep(TICK_S)

    # Rest

    def _rest(self, attempt: Attempt | None, outcome: Outcome) -> int:
        """Deliver the rest of the journal and write the outcome, however long the database takes to be there."""
        log.info("outcome: %s", outcome)

        def write() -> int:
            if attempt is not None:
                self._deliver_rest(attempt)
            with self.sessions.begin() as session:
                leases.held_run(session, self.run_id, self.token)
                write_outcome(session, self.run_id, self.token, outcome)
            return 0

        try:
            status = self._patiently(write)
            if attempt is not None and outcome.kind not in ("requeued", "lost"):
                attempt.pruner.finish(lambda: self.draining)
            return status
        except LeaseLost as lost:
            log.warning("the outcome no longer counts: %s", lost)
            if attempt is not None:
                self._tell_the_last(attempt)
            return 3

    def _deliver_rest(self, attempt: Attempt) -> None:
        try:
            self._renew()  # first: the database may have been away for longer than a lease
            while attempt.delivery.step(self.token):
                self._renew()
        except (*AWAY, LeaseLost):
            raise
        except Exception:
            # The outcome is written all the same; the rest stays in the journal.
            log.exception("the rest of the journal cannot be delivered")

    def _tell_the_last(self, attempt: Attempt) -> None:
        """What the trainer did after the lease was lost belongs to its segment, which the run has left."""
        try:
            attempt.delivery.all(self.token)
        except Exception as error:
            log.warning("the last lines of %s are not stored: %s", attempt.segment.journal, error)

    # The database

    def _database(self, work: Callable[[], None]) -> None:
        """Do what needs the database, unless that was done, or it was found away, a moment ago."""
        if time.monotonic() < self._look_at:
            return
        try:
            work()
            if self._is_away:
                log.info("the database answers again")
            self._is_away = False
            self._look_at = time.monotonic() + ATTEND_EVERY_S
        except AWAY as error:
            if not self._is_away:
                log.warning("training goes on, but %s", describe(error))
            self._is_away = True
            self._look_at = time.monotonic() + AWAY_PAUSE_S

    def _patiently(self, work: Callable[[], T]) -> T:
        """Do what cannot go on without the database, as often as it takes."""
        while True:
            try:
                return work()
            except AWAY as error:
                log.warning("trying again: %s", describe(error))
                time.sleep(AWAY_PAUSE_S)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m worker.supervise", description="Look after one claimed run.")
    parser.add_argument("run_id")
    parser.add_argument("token", type=int, help="lease token of the claim")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout)
    supervisor = Supervisor(settings_or_exit(), arguments.run_id, arguments.token)
    signal.signal(signal.SIGTERM, supervisor.drain)
    # A terminal's Ctrl-C and hang-up are for whoever started the platform; it drains us by SIGTERM.
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    try:
        return supervisor.run()
    finally:
        supervisor.engine.dispose()


if __name__ == "__main__":
    sys.exit(main())
