"""What becomes of a run that was asked to go back, however its attempt ends; in one transaction, without processes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import select, update

from ppo_core.rundir import JournalWriter
from store import recovery
from store.commands import request_command
from store.ids import new_id
from store.metrics_write import IterationMetrics, write_metrics
from store.models import Checkpoint, Command, LatestMetric, Run, RunEvent, RunIteration, Segment
from store.rollback import Wish, confirm_target, open_rollback, request_rollback
from store.runs import transition
from tests.worker.conftest import Claimed
from tests.worker.platform import wait_until
from worker.delivery import Delivery
from worker.outcome import Outcome, write_outcome
from worker.reconcile import Reconciler
from worker.settings import WorkerSettings


@pytest.fixture
def running(claimed: Claimed) -> Claimed:
    """Claimed and training: at iteration 12, a checkpoint at 5 and 10."""
    claimed.prepare()
    journal = JournalWriter(claimed.segment().journal)
    for iteration in range(1, 13):
        journal.append("metrics", iteration, {"a": 1.0})
        if iteration in (5, 10):
            journal.append("checkpoint", iteration, claimed.save(iteration))
    journal.close()
    Delivery(claimed.sessions, claimed.run_id, 1, claimed.segment()).all(claimed.token)
    with claimed.sessions.begin() as session:
        transition(session, claimed.run_id, "running")
    return claimed


def ask(running: Claimed, iteration: int = 5, segment: int = 1, *, verified: bool = True, **changes: Any) -> str:
    with running.sessions.begin() as session:
        target = session.scalars(
            select(Checkpoint).where(Checkpoint.segment == segment, Checkpoint.iteration == iteration)
        ).one()
        spec = {**session.get_one(Segment, (running.run_id, 1)).spec, **changes}
        command = request_rollback(
            session,
            running.run_id,
            Wish(target.id, spec, changes, "because"),
            command_id=new_id("c"),
            requested_by="ada",
            version=None,
            deadline_s=60,
        )
        asked = open_rollback(session, running.run_id)
        if verified and asked is not None:
            confirm_target(session, asked)
        return command.id


def states(claimed: Claimed) -> list[str]:
    with claimed.sessions() as session:
        told = session.scalars(select(RunEvent.payload).where(RunEvent.type == "state").order_by(RunEvent.seq))
        return [payload["to"] for payload in told]


def command(claimed: Claimed, command_id: str) -> Command:
    with claimed.sessions() as session:
        return session.get_one(Command, command_id)


ENDS = {
    "stopped": (Outcome("stopped", "stopped", "saved at iteration 12"), ["stopping", "queued"]),
    "paused": (Outcome("paused", "paused", "saved at iteration 12"), ["stopping", "queued"]),
    "drained": (Outcome("requeued", "drained", "saved at iteration 12"), ["stopping", "queued"]),
    "deadline": (Outcome("cancelled", "stop_deadline", "what came after is lost"), ["stopping", "queued"]),
    "gate": (Outcome("stopped", "gate", "saved at iteration 12"), ["stopped", "queued"]),
    "paused by a gate": (Outcome("paused", "gate", "saved at iteration 12"), ["stopped", "queued"]),
    "failed": (Outcome("failed", "reward", "too few scores"), ["failed", "queued"]),
    "succeeded": (Outcome("succeeded", "goal"), ["succeeded", "queued"]),
    "lost": (Outcome("lost", "trainer_lost", "signal 9"), ["recovering", "queued"]),
}


@pytest.mark.parametrize(
    ("end", "before"),
    [*((end, "stopping") for end in ENDS), ("stopped", "pausing"), ("failed", "running"), ("lost", "pausing")],
)
def test_however_the_attempt_ends_the_run_goes_back(running: Claimed, end: str, before: str) -> None:
    """An end that the run came to by itself stands in its history, before the roll back."""
    asked = ask(running, iterations=7, resources={"priority": 3, "gpus": 0})
    outcome, way = ENDS[end]
    if before != "running":
        with running.sessions.begin() as session:
            transition(session, running.run_id, before)
    known = len(states(running))
    with running.sessions.begin() as session:
        write_outcome(session, running.run_id, running.token, outcome)
    assert [state for state in states(running)[known:] if state != before] == [one for one in way if one != before]
    run = running.run()
    assert (run.state, run.active_segment, run.iteration, run.num_iterations) == ("queued", 2, 5, 7)
    assert (run.priority, run.lease_worker, run.infrastructure_failures, run.not_before) == (3, None, 0, None)
    done = command(running, asked)
    assert (done.status, done.outcome) == ("done", {"segment": 2, "iteration": 5})
    assert done.detail is not None
    assert done.detail.startswith("segment 2 starts from iteration 5 of segment 1")
    assert (str(outcome.detail) in done.detail) == (end not in ("stopped", "paused", "drained", "succeeded"))
    with running.sessions() as session:
        segment = session.get_one(Segment, (running.run_id, 2))
        assert (segment.kind, segment.created_by, segment.reason) == ("rollback", "ada", "because")


def test_an_unverified_roll_back_waits_for_the_run_to_rest(running: Claimed) -> None:
    asked = ask(running, verified=False)
    with running.sessions.begin() as session:
        write_outcome(session, running.run_id, running.token, Outcome("failed", "reward", "too few scores"))
    assert (running.run().state, command(running, asked).status) == ("failed", "pending")


def test_a_stop_asked_later_wins(running: Claimed) -> None:
    asked = ask(running)
    with running.sessions.begin() as session:
        request_command(session, running.run_id, "stop", "ada", 60)
    with running.sessions.begin() as session:
        write_outcome(session, running.run_id, running.token, Outcome("stopped", "stopped", "saved at iteration 12"))
    assert (running.run().state, command(running, asked).status) == ("stopped", "superseded")
    assert running.run().active_segment == 1


def test_a_target_that_went_in_the_last_moment_puts_the_run_back_where_it_was(running: Claimed) -> None:
    asked = ask(running)
    with running.sessions.begin() as session:
        transition(session, running.run_id, "stopping")
        session.execute(update(Checkpoint).where(Checkpoint.iteration == 5).values(status="removed"))
    with running.sessions.begin() as session:
        write_outcome(session, running.run_id, running.token, Outcome("stopped", "stopped", "saved at iteration 12"))
    assert (running.run().state, running.run().active_segment) == ("queued", 1)
    assert command(running, asked).status == "failed"


def test_a_lost_run_goes_back_in_place_of_being_restarted(running: Claimed) -> None:
    asked = ask(running)
    with running.sessions.begin() as session:
        transition(session, running.run_id, "recovering")
        recovery.settle(session, running.run_id, expect_token=running.token, code="supervisor_lost", detail="silent")
    run = running.run()
    assert (run.state, run.active_segment, run.infrastructure_failures) == ("queued", 2, 0)
    assert "silent" in (command(running, asked).detail or "")


def test_newest_values_are_those_of_the_line_after_each_turn(running: Claimed) -> None:
    """Back to 5, on to 7, then back to what was abandoned at 10."""

    def newest() -> tuple[int, int]:
        with running.sessions() as session:
            row = session.scalars(select(LatestMetric)).one()
            return row.segment, row.iteration

    assert newest() == (1, 12)
    ask(running)
    with running.sessions.begin() as session:
        write_outcome(session, running.run_id, running.token, Outcome("stopped", "stopped"))
    assert newest() == (1, 5)
    with running.sessions.begin() as session:
        rows = [IterationMetrics(iteration, datetime.now(UTC), {"a": 2.0}) for iteration in (6, 7)]
        write_metrics(session, running.run_id, 2, rows, active=True)
    assert newest() == (2, 7)
    running.claim()
    running.prepare()
    with running.sessions.begin() as session:
        transition(session, running.run_id, "running")
    ask(running, 10)
    with running.sessions.begin() as session:
        write_outcome(session, running.run_id, running.token, Outcome("stopped", "stopped"))
    assert newest() == (1, 10)
    assert running.run().active_segment == 3


def test_tokens_go_on_counting_where_the_segment_begins(running: Claimed) -> None:
    with running.sessions.begin() as session:
        session.execute(update(RunIteration).values(tokens=RunIteration.iteration * 100))
    ask(running)
    with running.sessions.begin() as session:
        write_outcome(session, running.run_id, running.token, Outcome("stopped", "stopped"))
        rows = [IterationMetrics(6, datetime.now(UTC), {"data/response_tokens": 40.0})]
        write_metrics(session, running.run_id, 2, rows, active=True)
        assert session.get_one(RunIteration, (running.run_id, 2, 6)).tokens == 540


def test_a_new_segment_starts_from_its_checkpoint_on_disk(running: Claimed) -> None:
    ask(running, iterations=7)
    with running.sessions.begin() as session:
        write_outcome(session, running.run_id, running.token, Outcome("stopped", "stopped"))
    running.claim()
    start = running.prepare().start
    assert (start.segment, start.checkpoint) == (2, str(running.segment().checkpoint(5)))
    assert start.spec["iterations"] == 7
    assert running.segment().read_start().segment == 1, "the old folder is as it was"


# Nobody holds the run


@pytest.fixture
def reconciler(running: Claimed, database_url: str) -> Iterator[Reconciler]:
    reconciler = Reconciler(WorkerSettings(database_url=database_url, data_dir=running.data))
    yield reconciler
    reconciler._let_go()
    reconciler.engine.dispose()


def _carry_out(reconciler: Reconciler) -> None:
    def settled() -> bool:
        for run_id, command_id in reconciler.rollbacks.waiting():
            reconciler.rollbacks.carry_out(run_id, command_id)
        return not reconciler.rollbacks.waiting()

    wait_until(settled)


def test_the_reconciler_carries_it_out_where_nobody_holds_the_run(running: Claimed, reconciler: Reconciler) -> None:
    with running.sessions.begin() as session:
        write_outcome(session, running.run_id, running.token, Outcome("failed", "reward", "too few scores"))
    asked = ask(running, verified=False)
    _carry_out(reconciler)
    assert (running.run().state, running.run().active_segment) == ("queued", 2)
    assert command(running, asked).status == "done"


def test_the_reconciler_leaves_a_held_run_to_its_supervisor(running: Claimed, reconciler: Reconciler) -> None:
    asked = ask(running, verified=True)
    assert reconciler.rollbacks.waiting() == []
    assert reconciler.rollbacks.carry_out(running.run_id, asked) is False
    assert running.run().active_segment == 1


def test_a_damaged_target_of_a_run_at_rest_fails_the_command_alone(running: Claimed, reconciler: Reconciler) -> None:
    with running.sessions.begin() as session:
        write_outcome(session, running.run_id, running.token, Outcome("failed", "reward", "too few scores"))
    file = running.segment().checkpoint(5) / "state.json"
    file.write_text("6")
    asked = ask(running, verified=False)
    _carry_out(reconciler)
    done = command(running, asked)
    assert (done.status, str(file) in (done.detail or "")) == ("failed", True)
    assert (running.run().state, running.run().active_segment) == ("failed", 1)


# Which checkpoint a restart takes


def test_a_restart_passes_over_damaged_checkpoints(running: Claimed) -> None:
    with running.sessions.begin() as session:
        session.execute(
            update(Checkpoint).where(Checkpoint.iteration == 10).values(status="damaged", status_detail="bits flipped")
        )
    running.lose()
    running.claim()
    start = running.prepare().start
    assert start.checkpoint == str(running.segment(1).checkpoint(5))
    with running.sessions() as session:
        newest = session.get_one(Segment, (running.run_id, start.segment))
        assert newest.kind == "recovery"


def test_a_roll_back_whose_target_proves_damaged_later_goes_further_back(running: Claimed) -> None:
    ask(running, 10)
    with running.sessions.begin() as session:
        write_outcome(session, running.run_id, running.token, Outcome("stopped", "stopped"))
        session.execute(update(Checkpoint).where(Checkpoint.iteration == 10).values(status="damaged"))
    running.claim()
    start = running.prepare().start
    assert start.checkpoint == str(running.segment().checkpoint(5))
    with running.sessions() as session:
        row = session.get_one(Segment, (running.run_id, start.segment))
        assert (row.kind, row.start_iteration) == ("recovery", 5)


def test_with_no_good_checkpoint_at_all_a_run_begins_anew(running: Claimed) -> None:
    with running.sessions.begin() as session:
        session.execute(update(Checkpoint).values(status="damaged"))
    running.lose()
    running.claim()
    start = running.prepare().start
    assert start.checkpoint is None
    run = running.run()
    assert (run.iteration, run.active_segment) == (0, start.segment)
    with running.sessions() as session:
        assert session.scalars(select(LatestMetric)).all() == []
        assert session.get_one(Run, running.run_id).active_segment == start.segment
