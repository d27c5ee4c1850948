"""From claim to rest with real processes: goal, stop, faults of the trainer, lost processes, drain."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import select, update

from store.commands import request_command
from store.models import Checkpoint, Run, Segment
from store.runs import transition
from store.states import TERMINAL
from tests.worker.platform import Platform, wait_until
from worker.processes import marked_processes

pytestmark = pytest.mark.stack


@pytest.fixture
def platform(database_url: str, tmp_path: Path) -> Iterator[Platform]:
    with Platform(database_url, tmp_path) as platform:
        yield platform


@pytest.fixture
def worker(platform: Platform) -> Platform:
    platform.start("worker.loop")
    return platform


def _at_rest(platform: Platform, run_id: str) -> None:
    """What holds of every run at rest: no process, no slot, all metrics there."""
    left = [Path(f"/proc/{process.pid}/cmdline").read_bytes() for process in marked_processes(run_id, 10**6)]
    assert [line for line in left if b"worker.supervise" not in line] == []  # that one is just leaving
    assert platform.busy_slots() == 0
    assert platform.stored_metrics(run_id) == platform.journal_metrics(run_id)


def test_run_succeeds_and_its_metrics_are_the_journals(worker: Platform) -> None:
    run_id = worker.submit(10, nan_at=3)
    run = worker.wait_state(run_id, *TERMINAL)
    assert (run.state, run.reason_code, run.iteration, run.attempt) == ("succeeded", "goal", 10, 1)
    assert worker.states(run_id) == ["queued", "starting", "running", "succeeded"]
    assert len(worker.journal_metrics(run_id)) == 60
    _at_rest(worker, run_id)
    assert "scripted attempt 1" in worker.segment(run_id).log(1, 0).read_text()
    with worker.sessions() as session:
        saved = session.scalars(select(Checkpoint.iteration).where(Checkpoint.run_id == run_id).order_by("iteration"))
        assert saved.all() == [5, 10]


def test_stop_in_the_middle_saves_and_stops(worker: Platform) -> None:
    run_id = worker.submit(10_000, iteration_s=0.2)
    worker.wait(run_id, lambda run: run.iteration >= 2)
    asked = time.monotonic()
    command_id = worker.stop(run_id)
    run = worker.wait_state(run_id, *TERMINAL)
    assert time.monotonic() - asked < 3
    assert (run.state, run.reason_code) == ("stopped", "stopped")
    assert "saved at iteration" in str(run.reason_detail)
    command = worker.command(command_id)
    assert command.status == "done"
    assert None not in (command.delivered_at, command.acked_at, command.finished_at)
    assert worker.states(run_id) == ["queued", "starting", "running", "stopping", "stopped"]
    _at_rest(worker, run_id)


def test_stop_while_loading_is_done_at_once(worker: Platform) -> None:
    run_id = worker.submit(10, loading_s=300)
    worker.wait(run_id, lambda run: run.phase == "loading")
    worker.stop(run_id)
    run = worker.wait_state(run_id, *TERMINAL, timeout_s=5)
    assert (run.state, run.reason_detail) == ("stopped", "ended while it was loading; no new checkpoint")
    _at_rest(worker, run_id)


def test_trainer_that_does_not_stop_is_ended_with_all_its_children(worker: Platform) -> None:
    """One child has left its session, one is deaf to SIGTERM, the trainer is deaf to everything."""
    run_id = worker.submit(10_000, ignore_stop=True, children=3)
    worker.wait_state(run_id, "running")
    assert len(marked_processes(run_id, 1)) == 5  # with the supervisor
    command_id = worker.stop(run_id, deadline_s=1)
    run = worker.wait_state(run_id, *TERMINAL)
    assert (run.state, run.reason_code) == ("cancelled", "stop_deadline")
    assert worker.command(command_id).status == "timed_out"
    assert worker.states(run_id)[-3:] == ["stopping", "killing", "cancelled"]
    _at_rest(worker, run_id)


def test_children_left_by_a_trainer_that_stopped_are_gone_before_stopped_is_written(worker: Platform) -> None:
    run_id = worker.submit(10_000, children=3)
    worker.wait(run_id, lambda run: run.iteration >= 1)
    worker.stop(run_id)
    assert worker.wait_state(run_id, *TERMINAL).state == "stopped"
    _at_rest(worker, run_id)


@pytest.mark.parametrize(
    ("code", "state", "reason"),
    [(70, "failed", "first_minibatch_ratio"), (69, "stopped", "gate"), (10, "paused", "gate")],
)
def test_last_word_decides(worker: Platform, code: int, state: str, reason: str) -> None:
    run_id = worker.submit(10, end_at=[3, code])
    run = worker.wait_state(run_id, "paused", *TERMINAL)
    assert (run.state, run.reason_code, run.attempt) == (state, reason, 1)
    if code == 70:
        assert (run.reason_detail, run.hint) == ("ratio is 1.034", "compare")


def test_a_full_disk_pauses_the_run_and_resumed_it_goes_on_from_its_last_good_checkpoint(worker: Platform) -> None:
    """T29 and P18: iterations after the checkpoint are done again, in a segment of their own."""
    run_id = worker.submit(15, disk_full_at=10)
    run = worker.wait_state(run_id, "paused", *TERMINAL)
    assert (run.state, run.reason_code, run.reason_detail) == ("paused", "disk_full", "no space left to write it")
    assert (run.hint, run.infrastructure_failures, run.iteration) == ("free space", 0, 10)
    assert worker.states(run_id) == ["queued", "starting", "running", "paused"]
    _at_rest(worker, run_id)
    with worker.sessions.begin() as session:
        transition(session, run_id, "queued")
    run = worker.wait_state(run_id, *TERMINAL)
    assert (run.state, run.active_segment, run.iteration) == ("succeeded", 2, 15)
    iterations = {(segment, iteration) for segment, iteration, _ in worker.stored_metrics(run_id)}
    assert iterations == {(1, number) for number in range(1, 11)} | {(2, number) for number in range(6, 16)}
    with worker.sessions() as session:
        saved = session.execute(select(Checkpoint.segment, Checkpoint.iteration).where(Checkpoint.run_id == run_id))
        assert sorted(map(tuple, saved)) == [(1, 5), (2, 10), (2, 15)]


def test_a_stop_that_finds_no_space_stops_and_says_what_it_could_not_save(worker: Platform) -> None:
    run_id = worker.submit(10_000, disk_full_at=2, checkpoint_every=10_000, iteration_s=0.2)
    worker.wait(run_id, lambda run: run.iteration >= 2)
    command = worker.stop(run_id)
    run = worker.wait_state(run_id, "paused", *TERMINAL)
    assert (run.state, run.reason_code, run.hint) == ("stopped", "disk_full", "free space")
    assert (worker.command(command).status, worker.command(command).detail) == ("done", "no space left to write it")


def test_bad_spec_fails_from_loading(worker: Platform) -> None:
    run = worker.wait_state(worker.submit(10, fail_loading=64), *TERMINAL)
    assert (run.state, run.reason_code, run.reason_detail, run.hint) == ("failed", "spec", "it cannot be", "change it")


@pytest.mark.parametrize("how", [{"die_at": 7}, {"torn_at": 7}])
def test_killed_trainer_is_started_again_from_its_checkpoint(worker: Platform, how: dict[str, int]) -> None:
    """Iteration 6 was journalled and checkpoint 5 is the newest: what is done again goes into a new segment."""
    run_id = worker.submit(10, **how)
    run = worker.wait_state(run_id, *TERMINAL)
    assert (run.state, run.attempt, run.active_segment, run.infrastructure_failures) == ("succeeded", 2, 2, 1)
    assert worker.states(run_id) == [
        *("queued", "starting", "running", "recovering", "queued", "starting", "running", "succeeded")
    ]
    _at_rest(worker, run_id)
    iterations = {(segment, iteration) for segment, iteration, _ in worker.stored_metrics(run_id)}
    assert iterations == {(1, number) for number in range(1, 7)} | {(2, number) for number in range(6, 11)}
    with worker.sessions() as session:
        segment = session.get_one(Segment, (run_id, 2))
        assert (segment.kind, segment.start_iteration) == ("recovery", 5)
        start = session.get_one(Checkpoint, segment.start_checkpoint)
        assert (start.segment, start.iteration) == (1, 5)


def test_killed_trainer_goes_on_in_its_segment_when_nothing_is_done_again(worker: Platform) -> None:
    run_id = worker.submit(10, die_at=6)
    run = worker.wait_state(run_id, *TERMINAL)
    assert (run.state, run.attempt, run.active_segment) == ("succeeded", 2, 1)
    _at_rest(worker, run_id)


def test_kill_from_outside_is_named(worker: Platform) -> None:
    run_id = worker.submit(10_000)
    worker.wait(run_id, lambda run: run.iteration >= 1)
    os.kill(worker.trainer_pid(run_id), signal.SIGKILL)
    run = worker.wait(run_id, lambda run: run.state != "running")
    assert run.reason_code in ("trainer_lost", None)
    run = worker.wait(run_id, lambda run: run.attempt == 2 and run.state == "running")
    worker.stop(run_id)
    assert worker.wait_state(run_id, *TERMINAL).state == "stopped"


def test_run_that_always_dies_fails_within_its_budget_and_another_one_passes(worker: Platform) -> None:
    doomed = worker.submit(10, die_at=1, attempts=99)
    other = worker.submit(5)
    run = worker.wait_state(other, *TERMINAL)
    assert run.state == "succeeded"
    deadline = time.monotonic() + 30
    while worker.run(doomed).state not in TERMINAL and time.monotonic() < deadline:
        with worker.sessions.begin() as session:  # the growing waits are looked at elsewhere
            session.execute(update(Run).where(Run.id == doomed, Run.state == "queued").values(not_before=None))
        time.sleep(0.2)
    run = worker.run(doomed)
    assert (run.state, run.attempt) == ("failed", 4)
    assert "trainer ended without a word (signal 9)" in str(run.reason_detail)


def test_killed_worker_leaves_its_runs_alone_and_finds_them_again(worker: Platform) -> None:
    run_id = worker.submit(60)
    worker.wait(run_id, lambda run: run.iteration >= 2)
    worker.processes[0].kill()
    second = worker.submit(5)
    worker.start("worker.loop")
    time.sleep(0.6)
    assert worker.run(second).state == "queued"  # the one slot of this machine is still in use
    assert worker.wait_state(run_id, *TERMINAL).attempt == 1
    assert worker.wait_state(second, *TERMINAL).state == "succeeded"


def test_drain_saves_and_requeues_and_the_next_worker_goes_on(worker: Platform) -> None:
    run_id = worker.submit(30)
    worker.wait(run_id, lambda run: run.iteration >= 7)
    first = worker.processes[0]
    first.terminate()
    assert first.wait(15) == 0
    run = worker.run(run_id)
    assert (run.state, run.reason_code, run.infrastructure_failures, run.active_segment) == ("queued", "drained", 0, 1)
    worker.start("worker.loop")
    run = worker.wait_state(run_id, *TERMINAL)
    assert (run.state, run.attempt, run.active_segment) == ("succeeded", 2, 1)
    assert worker.states(run_id)[2:6] == ["running", "stopping", "queued", "starting"]
    iterations = [iteration for _, _, iteration, _, what in worker.witnessed(run_id) if what == "iteration"]
    assert iterations == list(range(1, 31))  # nothing twice, nothing missing
    _at_rest(worker, run_id)


def test_a_pause_that_is_withdrawn_leaves_the_drain_in_force(worker: Platform) -> None:
    """Its trainer was late for the pause, and must not train on until the drain's own time is over."""
    run_id = worker.submit(10_000, checkpoint_every=10_000)  # frozen in a save it would be waited for, however late
    worker.wait(run_id, lambda run: run.iteration >= 2)
    trainer = worker.trainer_pid(run_id)
    os.kill(trainer, signal.SIGSTOP)
    with worker.sessions.begin() as session:
        asked = request_command(session, run_id, "pause", "test", 2).id
    wait_until(lambda: worker.command(asked).status == "delivered")
    worker.processes[0].terminate()
    wait_until(lambda: worker.command(asked).status == "timed_out")
    os.kill(trainer, signal.SIGCONT)
    run = worker.wait_state(run_id, "queued", timeout_s=20)
    assert (run.reason_code, run.infrastructure_failures) == ("drained", 0)
    assert worker.processes[0].wait(20) == 0


def test_trainer_sees_neither_database_nor_broker(platform: Platform) -> None:
    program = "import os, sys; print(sorted(k for k in os.environ if k in ('DATABASE_URL', 'REDIS_URL')), 'seen')"
    platform.settings["PPO_TRAINER_COMMAND"] = f'python3 -c "{program}"'
    platform.start("worker.loop")
    run_id = platform.submit(5)
    platform.wait(run_id, lambda run: run.infrastructure_failures > 0)
    assert platform.segment(run_id).log(1, 0).read_text().startswith("[] seen")


def test_trainer_that_cannot_be_started_fails_the_run(platform: Platform) -> None:
    platform.settings["PPO_TRAINER_COMMAND"] = "/nowhere/trainer"
    platform.start("worker.loop")
    run = platform.wait_state(platform.submit(5), *TERMINAL)
    assert (run.state, run.reason_code) == ("failed", "trainer_start")
    assert platform.busy_slots() == 0
