"""Several ranks from claim to rest: started together, ended together, and the outcome names the one that failed.

Whatever happens to one of them, the run has an outcome within 30 s and nothing of the attempt is left.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import select

from store.models import RunEvent
from store.states import TERMINAL
from tests.worker.platform import LEASE_S, Platform, alive, wait_until
from worker.processes import marked_processes

pytestmark = pytest.mark.stack

OUTCOME_S = 30.0


@pytest.fixture
def platform(database_url: str, tmp_path: Path) -> Iterator[Platform]:
    with Platform(database_url, tmp_path) as platform:
        yield platform


@pytest.fixture
def worker(platform: Platform) -> Platform:
    platform.start("worker.loop")
    return platform


def _running(worker: Platform, ranks: int, iterations: int = 10_000, **knobs: object) -> tuple[str, list[int]]:
    """A run in its second iteration or later, and the processes of its ranks."""
    run_id = worker.submit(iterations, ranks=ranks, **knobs)
    worker.wait(run_id, lambda run: run.iteration >= 2)
    return run_id, [worker.trainer_pid(run_id, rank) for rank in range(ranks)]


def _ports(worker: Platform, run_id: str) -> dict[int, set[str]]:
    """Where the ranks of each attempt were told to meet."""
    ports: dict[int, set[str]] = {}
    for _, attempt, _, _, what in worker.witnessed(run_id):
        if what.startswith("port-"):
            ports.setdefault(attempt, set()).add(what)
    return ports


def _lost(worker: Platform, run_id: str) -> str:
    """Wait for the outcome of the first attempt, which was lost, and for the run's further way to its goal."""
    worker.wait(run_id, lambda run: run.infrastructure_failures == 1, timeout_s=OUTCOME_S)
    assert not any(alive(pid) for _, attempt, _, pid, _ in worker.witnessed(run_id) if attempt == 1)
    statement = select(RunEvent.payload).where(RunEvent.run_id == run_id, RunEvent.type == "state")
    with worker.sessions() as session:
        (detail,) = [move["reason_detail"] for move in session.scalars(statement) if move["to"] == "recovering"]
    run = worker.wait_state(run_id, *TERMINAL)
    assert (run.state, run.attempt, run.infrastructure_failures) == ("succeeded", 2, 1)
    return str(detail)


def test_all_run_to_the_goal_in_one_group_each_with_its_own_log(worker: Platform) -> None:
    run_id, pids = _running(worker, 3, iterations=40)
    assert {os.getpgid(pid) for pid in pids} == {pids[0]}
    assert len(marked_processes(run_id, 1)) == 4  # with the supervisor
    run = worker.wait_state(run_id, *TERMINAL)
    assert (run.state, run.reason_code, run.iteration, run.attempt) == ("succeeded", "goal", 40, 1)
    for rank in range(3):
        assert "scripted attempt 1" in worker.segment(run_id).log(1, rank).read_text()
    assert not any(alive(pid) for pid in pids)
    assert worker.busy_slots() == 0
    assert worker.stored_metrics(run_id) == worker.journal_metrics(run_id)


def test_stop_saves_and_all_leave(worker: Platform) -> None:
    run_id, pids = _running(worker, 2)
    command_id = worker.stop(run_id)
    run = worker.wait_state(run_id, *TERMINAL)
    assert (run.state, run.reason_code) == ("stopped", "stopped")
    assert "saved at iteration" in str(run.reason_detail)
    assert worker.command(command_id).status == "done"
    assert not any(alive(pid) for pid in pids)


def test_a_rank_that_stays_when_the_run_is_at_rest_is_killed_and_changes_nothing(worker: Platform) -> None:
    run_id = worker.submit(5, ranks=2, linger_s=600)
    run = worker.wait_state(run_id, *TERMINAL, timeout_s=OUTCOME_S)
    assert (run.state, run.reason_code, run.attempt) == ("succeeded", "goal", 1)
    assert not alive(worker.trainer_pid(run_id, 1))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_and_the_run_goes_on_from_its_checkpoint(worker: Platform, rank: int) -> None:
    run_id = worker.submit(10, ranks=3, rank=rank, die_at=7)
    assert f"rank {rank}: signal 9; ranks" in _lost(worker, run_id)
    first, second = _ports(worker, run_id).values()
    assert (len(first), len(second)) == (1, 1)  # all of an attempt meet at one port
    assert first != second


def test_ranks_that_do_not_notice_that_another_was_killed_are_ended(worker: Platform) -> None:
    """They wait for it and obey no SIGTERM, as in a collective whose timeout is long."""
    run_id, pids = _running(worker, 3, iterations=40, stays=True, ignore_stop=True)
    os.kill(pids[2], signal.SIGKILL)
    wait_until(lambda: not any(alive(pid) for pid in pids), 10)
    assert "rank 2: signal 9; ranks 0, 1: signal 9, ended with the others" in _lost(worker, run_id)


def test_a_rank_0_that_takes_the_broken_connection_for_its_own_fault_does_not_fail_the_run(worker: Platform) -> None:
    run_id = worker.submit(10, ranks=2, rank=1, die_at=7, echoes=True)
    assert "rank 1: signal 9" in _lost(worker, run_id)


def test_a_rank_that_fails_alone_is_the_cause_also_where_rank_0_took_it_for_its_own_fault(worker: Platform) -> None:
    run_id = worker.submit(10, ranks=2, rank=1, fault_at=3, echoes=True)
    run = worker.wait_state(run_id, *TERMINAL, timeout_s=OUTCOME_S)
    assert (run.state, run.reason_code, run.reason_detail) == ("failed", "data", "rank 1: row 7 is empty")


def test_a_stopped_rank_is_found_by_the_others_and_killed(worker: Platform) -> None:
    """Rank 0 waits for it in vain and leaves; nobody would ever have left otherwise."""
    run_id = worker.submit(10, ranks=3, rank=1, freeze_at=7, meeting_s=2)
    detail = _lost(worker, run_id)
    assert "rank 1: signal 9, ended while it stood stopped" in detail
    assert "exit code 1" in detail


def test_a_rank_0_that_is_stopped_is_found_by_the_others(worker: Platform) -> None:
    run_id = worker.submit(10, ranks=2, rank=0, freeze_at=7, meeting_s=2)
    detail = _lost(worker, run_id)
    assert "rank 1: exit code 1; rank 0: signal 9, ended while it stood stopped" in detail


def test_a_rank_that_fails_alone_fails_the_run_with_its_fault(worker: Platform) -> None:
    run_id = worker.submit(10, ranks=3, rank=2, fault_at=3)
    run = worker.wait_state(run_id, *TERMINAL, timeout_s=OUTCOME_S)
    assert (run.state, run.reason_code, run.attempt, run.infrastructure_failures) == ("failed", "data", 1, 0)
    assert (run.reason_detail, run.hint) == ("rank 2: row 7 is empty", "fill it")


@pytest.mark.parametrize(("code", "reason"), [(64, "spec"), (65, "data"), (70, "trainer_fault")])
def test_a_rank_that_leaves_with_a_faults_code_fails_the_run_with_the_end_of_its_log(
    worker: Platform, code: int, reason: str
) -> None:
    run_id = worker.submit(10, ranks=2, rank=1, leave_at=[3, code])
    run = worker.wait_state(run_id, *TERMINAL, timeout_s=OUTCOME_S)
    assert (run.state, run.reason_code, run.attempt) == ("failed", reason, 1)
    assert f"rank 1: exit code {code}; the end of its log:\n" in str(run.reason_detail)
    assert "rank 1 cannot go on" in str(run.reason_detail)
    assert run.hint == "Look at rank 1's log."


def test_ranks_that_do_not_stop_are_all_ended_by_the_stops_deadline(worker: Platform) -> None:
    run_id, pids = _running(worker, 2, ignore_stop=True)
    worker.stop(run_id, deadline_s=1)
    run = worker.wait_state(run_id, *TERMINAL, timeout_s=OUTCOME_S)
    assert (run.state, run.reason_code) == ("cancelled", "stop_deadline")
    assert not any(alive(pid) for pid in pids)


def test_a_killed_supervisor_takes_every_rank_along_and_the_run_comes_back(worker: Platform) -> None:
    worker.start("worker.reconcile")
    run_id, pids = _running(worker, 3, iterations=40)
    os.kill(worker.supervisor_pid(run_id), signal.SIGKILL)
    wait_until(lambda: not any(alive(pid) for pid in pids), 2)
    worker.wait(run_id, lambda run: run.attempt == 2, timeout_s=LEASE_S + 10)
    assert worker.wait_state(run_id, *TERMINAL).state == "succeeded"
    first, second = _ports(worker, run_id).values()
    assert first != second
