"""Random commands against random faults, on a real database: what must hold of runs whatever happens in whatever order.

Two workers, three slots each, claim, renew, deliver, drain, come to outcomes, go silent and are recovered, while people
ask for everything and clocks jump. Every step is a call of the function that the platform itself uses.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from ppo_core.rundir import Event, SegmentDir
from store import leases, workers
from store.commands import (
    WITHDRAWN_LATE,
    finish_late,
    mark_acked,
    mark_delivered,
    open_commands,
    request_command,
    request_requeue,
    time_out_unattended,
)
from store.ids import new_id
from store.journal import ingest, journal_position
from store.models import Checkpoint, Command, Run, RunEvent, WorkerSlot
from store.queue import Claim, claim
from store.rollback import UNHELD, Wish, confirm_target, fail_rollback, go_back, open_rollback, request_rollback
from store.runs import CommandRefused, LeaseLost, create_run, locked_run, transition
from store.session import make_engine, session_factory
from worker.outcome import Outcome, write_outcome
from worker.reconcile import Reconciler
from worker.settings import WorkerSettings

LEASE_S = 20.0
# Written by hand after the design, not read from the code: who may go where.
DECLARED = {
    None: "queued",
    "queued": "starting stopped cancelled",
    "starting": "running stopping killing recovering failed",
    "running": "pausing stopping killing succeeded stopped paused recovering failed",
    "pausing": "paused running stopping killing recovering failed succeeded stopped",
    "paused": "queued stopped cancelled",
    "stopping": "stopped queued killing recovering failed succeeded",
    "killing": "cancelled recovering",
    "recovering": "queued failed stopped cancelled",
    "stopped": "queued",
    "cancelled": "queued",
    "failed": "queued",
    "succeeded": "queued",
}
ENDED = {"stopped", "cancelled", "failed", "succeeded"}
HELD = {"starting", "running", "pausing", "stopping", "killing", "recovering"}
OUTCOMES = [
    Outcome("succeeded", "goal"),
    Outcome("paused", "paused", "saved"),
    Outcome("paused", "gate"),
    Outcome("stopped", "stopped", "saved"),
    Outcome("stopped", "gate"),
    Outcome("failed", "trainer_fault", "ratio"),
    Outcome("requeued", "drained"),
    Outcome("cancelled", "stop_deadline", "it did not stop"),
    Outcome("cancelled", "killed"),
    Outcome("lost", "trainer_lost", "signal 9"),
]
KINDS = ["stop", "stop", "pause", "checkpoint", "kill", "resume", "retry", "rollback", "rollback"]
PICK = st.integers(0, 999)


class Platform(RuleBasedStateMachine):
    """Everybody at once. `claims` are those that some supervisor still believes in, rightly or not."""

    url: str
    data: Path

    def __init__(self) -> None:
        super().__init__()
        self.engine = make_engine(self.url, pool_size=2)
        self.sessions = session_factory(self.engine)
        self.reconciler = Reconciler(
            WorkerSettings(DATABASE_URL=self.url, REDIS_URL=None, data_dir=self.data, worker_id="r", lease_s=LEASE_S)
        )
        self.runs: list[str] = []
        self.claims: list[tuple[Claim, str]] = []
        self.tokens: dict[str, int] = {}
        self.finished: dict[str, tuple[Any, ...]] = {}
        self.seen: dict[str, tuple[int, str | None]] = {}
        with self.sessions.begin() as session:
            session.execute(text("TRUNCATE runs, workers CASCADE"))
            for worker in ("a", "b"):
                self._register(session, worker)

    def teardown(self) -> None:
        self.engine.dispose()
        self.reconciler.engine.dispose()

    def _register(self, session: Session, worker: str) -> None:
        slots = {"cpu_slots": 1, "gpus": 2, "version": "0", "data_token": "t"}
        workers.register(session, worker_id=worker, host="here", pid=1, **slots)

    # People

    @rule(gpus=st.sampled_from([0, 0, 1, 2]), priority=st.integers(-1, 1))
    def submit(self, gpus: int, priority: int) -> None:
        run_id = new_id("r")
        spec = {"iterations": 9, "resources": {"gpus": gpus, "priority": priority}}
        fields = {"name": "n", "spec": spec, "num_iterations": 9, "gpus": gpus, "priority": priority}
        with self.sessions.begin() as session:
            create_run(session, run_id=run_id, created_by="ada", **fields)
        self.runs.append(run_id)

    @precondition(lambda self: self.runs)
    @rule(pick=PICK, kind=st.sampled_from(KINDS), deadline_s=st.sampled_from([0.0, 5.0, 60.0]))
    def ask(self, pick: int, kind: str, deadline_s: float) -> None:
        run_id = self.runs[pick % len(self.runs)]
        with contextlib.suppress(CommandRefused), self.sessions.begin() as session:
            if kind in ("resume", "retry"):
                request_requeue(session, run_id, kind, "ada")
            elif kind == "rollback":
                checkpoint = session.scalar(select(Checkpoint.id).where(Checkpoint.run_id == run_id).limit(1))
                if checkpoint is not None:
                    wish = Wish(checkpoint, session.get_one(Run, run_id).spec, {})
                    arguments = {"command_id": new_id("c"), "requested_by": "ada", "version": None}
                    request_rollback(session, run_id, wish, deadline_s=deadline_s, **arguments)
            else:
                request_command(session, run_id, kind, "ada", deadline_s)

    # Workers and supervisors

    @rule(worker=st.sampled_from("ab"))
    def claim(self, worker: str) -> None:
        with self.sessions.begin() as session:
            workers.heartbeat(session, worker)
            claimed = claim(session, worker, LEASE_S)
        if claimed is not None:
            assert claimed.token == self.tokens.get(claimed.run_id, 0) + 1
            self.claims.append((claimed, worker))

    def _held(self, pick: int, work: Callable[[Session, Run, int], None]) -> None:
        """What a supervisor does, who learns from the database alone whether it still holds its run."""
        claimed, _ = self.claims[pick % len(self.claims)]
        try:
            with self.sessions.begin() as session:
                work(session, leases.held_run(session, claimed.run_id, claimed.token), claimed.token)
        except LeaseLost:
            with self.sessions() as session:
                run = session.get_one(Run, claimed.run_id)
                assert run.lease_token > claimed.token or run.state not in HELD - {"recovering"}

    @precondition(lambda self: self.claims)
    @rule(pick=PICK)
    def renew(self, pick: int) -> None:
        self._held(pick, lambda session, run, token: leases.renew(session, run.id, token, LEASE_S))

    @precondition(lambda self: self.claims)
    @rule(pick=PICK, what=st.sampled_from(["started", "phase", "metrics", "checkpoint", "note"]))
    def deliver(self, pick: int, what: str) -> None:
        """Also by one who lost the run: history counts from anybody, state and checkpoints do not."""
        claimed, _ = self.claims[pick % len(self.claims)]
        with self.sessions.begin() as session:
            run = session.get_one(Run, claimed.run_id)
            segment, before = run.active_segment, run.state
            seq, offset = journal_position(session, run.id, segment)
            iteration = run.iteration + (what == "metrics")
            payload: dict[str, Any] = {
                "started": {"attempt": run.attempt, "token": claimed.token},
                "phase": {"phase": "rollout", "deadline_s": 60.0},
                "metrics": {"reward/score_mean": 0.5},
                "checkpoint": {
                    "path": f"checkpoints/iter-{iteration:06d}", "bytes": 1, "manifest_sha256": "0" * 64,
                    "reason": "schedule", "judge_score": None,
                },
                "note": {"level": "info", "message": "m"},
            }[what]  # fmt: skip
            event = Event(seq + 1, what, iteration, datetime.now(UTC).isoformat(), payload)
            folder = SegmentDir(self.data / "runs" / run.id / f"segment-{segment:04d}")
            ingest(session, run.id, segment, [event], offset + 1, token=claimed.token, folder=folder)
            session.refresh(run)
            assert run.state == before or (run.lease_token, before, run.state) == (claimed.token, "starting", "running")

    @precondition(lambda self: self.claims)
    @rule(pick=PICK, step=st.integers(0, 3))
    def follow_commands(self, pick: int, step: int) -> None:
        """Hand over, acknowledge, take back what is late, have a run go back whose checkpoint was compared."""

        def work(session: Session, run: Run, token: int) -> None:
            for command in open_commands(session, run.id):
                if command.kind == "rollback":
                    asked = open_rollback(session, run.id)
                    assert asked is not None
                    if step == 0:
                        fail_rollback(session, asked, "damaged", damaged=False)
                    elif step == 1:
                        confirm_target(session, asked)
                    elif asked.verified and run.state in ("starting", "running", "pausing"):
                        transition(session, run.id, "stopping", expect_token=token, reason_code="rollback")
                elif command.kind in WITHDRAWN_LATE and step == 3:
                    finish_late(session, run.id, token, command.id, "update")
                elif step == 2:
                    mark_acked(session, command.id)
                else:
                    mark_delivered(session, command.id)

        self._held(pick, work)

    @precondition(lambda self: self.claims)
    @rule(pick=PICK)
    def drain(self, pick: int) -> None:
        def work(session: Session, run: Run, token: int) -> None:
            if run.state in ("starting", "running"):
                transition(session, run.id, "stopping", expect_token=token, reason_code="drain")

        self._held(pick, work)

    @precondition(lambda self: self.claims)
    @rule(pick=PICK, outcome=st.sampled_from(OUTCOMES))
    def end(self, pick: int, outcome: Outcome) -> None:
        def work(session: Session, run: Run, token: int) -> None:
            write_outcome(session, run.id, token, outcome)

        self._held(pick, work)
        self.claims.pop(pick % len(self.claims))

    # The reconciler, and time

    @rule(seconds=st.sampled_from([-30, 1, 10, 30, 90]))
    def time_passes(self, seconds: int) -> None:
        """The clock of the database steps on or back: each moment compared with it lies that much earlier or later."""
        with self.sessions.begin() as session:
            for table, columns in {
                "runs": ("lease_expires_at", "not_before", "queued_at", "progress_deadline_at"),
                "commands": ("deadline_at",),
                "workers": ("heartbeat_at",),
            }.items():
                moves = ", ".join(f"{column} = {column} - :step * interval '1 s'" for column in columns)
                session.execute(text(f"UPDATE {table} SET {moves}"), {"step": seconds})

    @rule()
    def declare_lost(self) -> None:
        with self.sessions() as session:
            overdue = leases.expired(session, 0)
        for run_id, token in overdue:
            self.reconciler._declare_lost(run_id, token)

    @precondition(lambda self: self.runs)
    @rule(pick=PICK)
    def recover(self, pick: int) -> None:
        with self.sessions() as session:
            lost = list(session.scalars(select(Run).where(Run.state == "recovering").order_by(Run.id)))
        if lost:
            run = lost[pick % len(lost)]
            self.reconciler._recover(run.id, run.lease_token, run.active_segment)

    @precondition(lambda self: self.runs)
    @rule(pick=PICK, whole=st.booleans())
    def roll_back_at_rest(self, pick: int, whole: bool) -> None:
        run_id = self.runs[pick % len(self.runs)]
        with self.sessions.begin() as session:
            run, asked = locked_run(session, run_id), open_rollback(session, run_id)
            if asked is None or run.state not in UNHELD:
                return
            if whole:
                confirm_target(session, asked)
                go_back(session, run_id, asked)
            else:
                fail_rollback(session, asked, "damaged", damaged=False)

    @rule()
    def keep_house(self) -> None:
        with self.sessions.begin() as session:
            workers.mark_silent(session, LEASE_S)
            assert workers.free_stray_slots(session) == 0
            time_out_unattended(session)

    # What holds after every step

    @invariant()
    def only_declared_moves_and_ends_are_left_by_people_alone(self) -> None:
        with self.sessions() as session:
            for run in session.scalars(select(Run)):
                seq, state = self.seen.get(run.id, (0, None))
                fresh = select(RunEvent).where(RunEvent.run_id == run.id, RunEvent.seq > seq, RunEvent.type == "state")
                for event in session.scalars(fresh.order_by(RunEvent.seq)):
                    assert event.payload["from"] == state
                    state = event.payload["to"]
                    assert state in DECLARED[event.payload["from"]].split()
                    if event.payload["from"] in ENDED:
                        assert event.payload["reason_code"] in ("resume", "retry", "rollback")
                        assert event.actor == "ada"
                assert state == run.state
                self.seen[run.id] = (run.event_seq, state)

    @invariant()
    def a_run_has_one_lease_and_its_slots_and_no_slot_two_runs(self) -> None:
        with self.sessions() as session:
            slots = list(session.scalars(select(WorkerSlot).where(WorkerSlot.run_id.is_not(None))))
            for run in session.scalars(select(Run)):
                mine = [(slot.worker_id, slot.kind) for slot in slots if slot.run_id == run.id]
                if run.state in HELD:
                    # A roll back may have changed what the next attempt needs; the present one keeps what it took.
                    assert set(mine) == {(run.lease_worker, "gpu" if run.gpus else "cpu")}
                    assert len(mine) == max(1, run.gpus)
                else:
                    assert (mine, run.lease_worker, run.lease_expires_at) == ([], None, None)
                assert run.lease_token >= self.tokens.get(run.id, 0)
                assert run.lease_token == run.attempt
                self.tokens[run.id] = run.lease_token

    @invariant()
    def commands_have_one_outcome_and_none_is_left_open_behind(self) -> None:
        with self.sessions() as session:
            states = dict(session.execute(select(Run.id, Run.state)).all())
            for command in session.scalars(select(Command)):
                over = command.status in ("done", "failed", "superseded", "timed_out")
                assert over == (command.finished_at is not None)
                if over:
                    last = (command.status, command.detail, command.finished_at)
                    assert self.finished.setdefault(command.id, last) == last
                elif command.kind != "rollback":
                    assert states[command.run_id] not in ENDED | {"paused"}
                    assert command.kind not in ("resume", "retry")
                    if command.kind == "kill":
                        assert states[command.run_id] in ("killing", "recovering")
            open_kills = select(Command.run_id).where(Command.kind == "kill", Command.finished_at.is_(None))
            killing = {run_id for run_id, state in states.items() if state == "killing"}
            assert killing <= set(session.scalars(open_kills))
            kinds = select(func.count()).where(Command.finished_at.is_(None)).group_by(Command.run_id, Command.kind)
            assert set(session.scalars(kinds)) <= {1}


def _drive(url: str, data: Path, examples: int, steps: int, *, at_random: bool) -> None:
    machine = type("OnThisDatabase", (Platform,), {"url": url, "data": data})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, database=None,
            derandomize=not at_random, suppress_health_check=list(HealthCheck), print_blob=True,
        ),
    )  # fmt: skip


@pytest.mark.stack
def test_hundreds_of_steps(database_url: str, tmp_path: Path) -> None:
    _drive(database_url, tmp_path, 8, 50, at_random=False)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thousands_of_steps(database_url: str, tmp_path: Path) -> None:
    examples = int(os.environ.get("PPO_TEST_STATE_MACHINES", "60"))
    _drive(database_url, tmp_path, examples, 100, at_random=True)
