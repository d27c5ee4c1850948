"""Roll back, resume and retry with real processes: from every state, twice, back again, and through faults."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from store import workers
from store.commands import request_command, request_requeue
from store.models import Checkpoint, RunEvent, Segment
from store.states import TERMINAL
from tests.worker.going_back import checkpoint, go_back, history, newest_score, scores, segments
from tests.worker.platform import Platform, wait_until

pytestmark = pytest.mark.stack


@pytest.fixture
def platform(database_url: str, tmp_path: Path) -> Iterator[Platform]:
    with Platform(database_url, tmp_path, {"PPO_CPU_SLOTS": "8", "PPO_LEASE_S": "8"}) as platform:
        yield platform


@pytest.fixture
def worker(platform: Platform) -> Platform:
    platform.start("worker.loop")
    platform.start("worker.reconcile")
    return platform


def _done(platform: Platform, command_id: str, timeout_s: float = 60) -> Any:
    wait_until(lambda: platform.command(command_id).finished_at is not None, timeout_s)
    return platform.command(command_id)


def _flip(platform: Platform, target: str) -> Path:
    """One bit of a checkpoint's weights, its size kept; returns the file."""
    with platform.sessions() as session:
        row = session.get_one(Checkpoint, target)
    file = platform.data / "runs" / row.run_id / row.path / "weights"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return file


def _said(platform: Platform, run_id: str) -> list[str]:
    """What this run's trainers did, in their own witness."""
    return [what for *_, what in platform.witnessed(run_id)]


def _submit(platform: Platform, iterations: int = 10_000, **knobs: Any) -> str:
    """A run whose checkpoints all stay."""
    spec = {"iterations": iterations, "scripted": knobs, "checkpoints": {"keep_last": -1}}
    return platform.submit_spec(spec)


def test_back_while_running_then_again_and_then_undone(worker: Platform) -> None:
    """P15: 300 iterations, a checkpoint every 50; at 260 back to 200. Twice, and then to what was abandoned."""
    run_id = _submit(worker, 300, iteration_s=0.03, checkpoint_every=50)
    worker.wait(run_id, lambda run: run.iteration >= 255)
    first = go_back(worker, run_id, checkpoint(worker, run_id, 200))
    command = _done(worker, first)
    assert (command.status, command.outcome) == ("done", {"segment": 2, "iteration": 200}), command.detail
    assert command.detail.startswith("segment 2 starts from iteration 200 of segment 1")
    assert command.delivered_at is not None
    abandoned = history(worker, run_id, 1)
    with worker.sessions() as session:
        saved = session.scalars(
            select(Checkpoint.iteration).where(Checkpoint.run_id == run_id, Checkpoint.segment == 1)
        ).all()
    end = max(saved)
    assert end >= 255, "the present state was saved before it stopped"

    run = worker.wait_state(run_id, *TERMINAL)
    assert (run.state, run.iteration, run.active_segment) == ("succeeded", 300, 2)
    assert scores(worker, run_id) == {(1, True): list(range(1, 201)), (2, True): list(range(201, 301))}
    everything = scores(worker, run_id, abandoned_too=True)
    assert everything[1, False] == list(range(201, end + 1))
    assert newest_score(worker, run_id) == (2, 300)

    second = _done(worker, go_back(worker, run_id, checkpoint(worker, run_id, 250, segment=2), iterations=260))
    assert (second.status, second.outcome["segment"]) == ("done", 3)
    run = worker.wait(run_id, lambda run: run.state == "succeeded" and run.active_segment == 3)
    assert (run.iteration, run.num_iterations) == (260, 260)

    undone = _done(worker, go_back(worker, run_id, checkpoint(worker, run_id, end, segment=1)))
    assert undone.outcome == {"segment": 4, "iteration": end}
    run = worker.wait(run_id, lambda run: run.state == "succeeded" and run.active_segment == 4)
    assert (run.iteration, run.num_iterations) == (300, 300)
    assert scores(worker, run_id) == {(1, True): list(range(1, end + 1)), (4, True): list(range(end + 1, 301))}
    assert segments(worker, run_id) == [
        (1, "start", 0), (2, "rollback", 200), (3, "rollback", 250), (4, "rollback", end),
    ]  # fmt: skip
    assert history(worker, run_id, 1) == abandoned, "nothing of the abandoned segment was touched"
    assert worker.stored_metrics(run_id) == worker.journal_metrics(run_id)
    with worker.sessions() as session:
        rows = [session.get_one(Segment, (run_id, number)) for number in (2, 3, 4)]
        assert {(row.created_by, row.reason) for row in rows} == {("ada", "because")}
        told = session.scalars(select(RunEvent).where(RunEvent.run_id == run_id, RunEvent.type == "segment")).all()
        assert [(event.actor, event.payload["number"], event.payload["from_segment"]) for event in told] == [
            ("ada", 2, 1), ("ada", 3, 2), ("ada", 4, 1),
        ]  # fmt: skip
        assert told[1].payload["set"] == {"iterations": 260}


def test_back_from_every_state_at_rest(worker: Platform) -> None:
    long = {"iteration_s": 0.02, "checkpoint_every": 5}
    runs = {
        "paused": _submit(worker, 10_000, **long),
        "stopped": _submit(worker, 10_000, **long),
        "failed": _submit(worker, 20, **long, end_at=[12, 70]),
        "cancelled": _submit(worker, 10_000, **long, ignore_stop=True),
        "succeeded": _submit(worker, 20, **long),
    }
    for state in ("paused", "stopped", "cancelled"):
        worker.wait(runs[state], lambda run: run.iteration >= 12)
    with worker.sessions.begin() as session:
        request_command(session, runs["paused"], "pause", "ada", 30)
    worker.stop(runs["stopped"])
    worker.stop(runs["cancelled"], deadline_s=0.2)
    for state, run_id in runs.items():
        worker.wait_state(run_id, state)
    commands = {
        run_id: go_back(
            worker, run_id, checkpoint(worker, run_id, 10), iterations=15, scripted={**long, "checkpoint_every": 1}
        )
        for run_id in runs.values()
    }
    for state, run_id in runs.items():
        assert _done(worker, commands[run_id]).status == "done", state
        run = worker.wait(run_id, lambda run: run.state == "succeeded" and run.active_segment == 2)
        assert (run.iteration, run.reason_code) == (15, "goal"), state
        active = scores(worker, run_id)
        assert (active[1, True][-1], active[2, True]) == (10, [11, 12, 13, 14, 15]), state
        assert worker.states(run_id)[-4:] == ["queued", "starting", "running", "succeeded"], state


def test_back_of_a_queued_run(platform: Platform) -> None:
    """No worker takes it: the reconciler opens the segment, and the run stays queued for it."""
    worker = platform.start("worker.loop")
    reconciler = platform.start("worker.reconcile")
    run_id = _submit(platform, 10_000, iteration_s=0.02)
    platform.wait(run_id, lambda run: run.iteration >= 12)
    worker.terminate()
    worker.wait()
    assert platform.run(run_id).state == "queued", "drained"
    command = _done(platform, go_back(platform, run_id, checkpoint(platform, run_id, 5), iterations=8))
    run = platform.run(run_id)
    assert (command.status, run.state, run.active_segment, run.iteration) == ("done", "queued", 2, 5)
    assert newest_score(platform, run_id) == (1, 5)
    platform.start("worker.loop")
    platform.wait_state(run_id, "succeeded")
    assert reconciler.poll() is None


def test_another_worker_with_its_own_scratch_takes_the_new_segment(platform: Platform, tmp_path: Path) -> None:
    """The two share the data folder and nothing else."""
    scratch = {name: tmp_path / name for name in ("one", "two")}
    for folder in scratch.values():
        folder.mkdir()
    platform.start("worker.loop", PPO_WORKER_ID="one", TMPDIR=str(scratch["one"]), HOME=str(scratch["one"]))
    platform.start("worker.reconcile")
    run_id = _submit(platform, 200, iteration_s=0.05)
    platform.wait(run_id, lambda run: run.iteration >= 12)
    platform.start("worker.loop", PPO_WORKER_ID="two", TMPDIR=str(scratch["two"]), HOME=str(scratch["two"]))
    wait_until(lambda: len(_worker_ids(platform)) == 2, 60)
    with platform.sessions.begin() as session:
        workers.set_state(session, "one", "draining")
    assert _done(platform, go_back(platform, run_id, checkpoint(platform, run_id, 10))).status == "done"
    run = platform.wait(run_id, lambda run: run.state in ("starting", "running"))
    assert run.lease_worker == "two"
    run = platform.wait_state(run_id, *TERMINAL)
    assert (run.state, run.active_segment, run.iteration) == ("succeeded", 2, 200)
    assert platform.stored_metrics(run_id) == platform.journal_metrics(run_id)


def _worker_ids(platform: Platform) -> list[str]:
    with platform.sessions() as session:
        return [standing.id for standing in session.scalars(select(workers.Worker))]


def test_a_damaged_target_fails_the_command_and_the_run_goes_on(worker: Platform) -> None:
    run_id = _submit(worker, iteration_s=0.02)
    worker.wait(run_id, lambda run: run.iteration >= 12)
    target = checkpoint(worker, run_id, 10)
    file = _flip(worker, target)
    command = _done(worker, go_back(worker, run_id, target))
    assert (command.status, command.outcome) == ("failed", None)
    assert str(file) in command.detail
    reached = worker.run(run_id).iteration
    run = worker.wait(run_id, lambda run: run.iteration > reached + 3)
    assert (run.state, run.attempt, run.active_segment) == ("running", 1, 1)
    assert worker.states(run_id) == ["queued", "starting", "running"]
    with worker.sessions() as session:
        told = session.scalars(
            select(RunEvent.payload).where(RunEvent.run_id == run_id, RunEvent.type == "checkpoint")
        ).all()
    (damage,) = (event for event in told if event["status"] == "damaged")
    assert (damage["id"], str(file) in damage["status_detail"]) == (target, True)


def test_a_damaged_target_of_a_stopped_run_leaves_it_stopped(worker: Platform) -> None:
    run_id = _submit(worker, 10_000, iteration_s=0.02)
    worker.wait(run_id, lambda run: run.iteration >= 12)
    worker.stop(run_id)
    worker.wait_state(run_id, "stopped")
    target = checkpoint(worker, run_id, 10)
    file = _flip(worker, target)
    command = _done(worker, go_back(worker, run_id, target))
    assert (command.status, str(file) in command.detail) == ("failed", True)
    assert (worker.run(run_id).state, segments(worker, run_id)) == ("stopped", [(1, "start", 0)])


def test_a_trainer_that_does_not_stop_is_ended_and_the_run_goes_back_all_the_same(platform: Platform) -> None:
    platform.settings["PPO_ROLLBACK_STOP_S"] = "1"
    platform.start("worker.loop")
    run_id = _submit(platform, 10_000, iteration_s=0.05, ignore_stop=True, children=2)
    platform.wait(run_id, lambda run: run.iteration >= 12)
    command = _done(platform, go_back(platform, run_id, checkpoint(platform, run_id, 10), iterations=12, scripted={}))
    assert (command.status, command.outcome["segment"]) == ("done", 2)
    assert "did not stop" in command.detail
    assert "what it had not saved is lost" in command.detail
    assert platform.wait_state(run_id, *TERMINAL).state == "succeeded"


def test_a_supervisor_killed_between_command_and_outcome(worker: Platform) -> None:
    run_id = _submit(worker, 10_000, iteration_s=0.05, ignore_stop=True)
    worker.wait(run_id, lambda run: run.iteration >= 12)
    supervisor = worker.supervisor_pid(run_id)
    asked = go_back(worker, run_id, checkpoint(worker, run_id, 10), iterations=12, scripted={})
    worker.wait_state(run_id, "stopping")
    os.kill(supervisor, signal.SIGKILL)
    command = _done(worker, asked)
    assert (command.status, command.outcome) == ("done", {"segment": 2, "iteration": 10})
    assert "was silent" in command.detail
    run = worker.wait_state(run_id, *TERMINAL)
    assert (run.state, run.iteration) == ("succeeded", 12)
    assert worker.stored_metrics(run_id) == worker.journal_metrics(run_id)


def test_back_of_a_run_that_saves_and_of_one_that_loads(worker: Platform) -> None:
    """A save under way is finished and stays in the history; a trainer that still loads is ended."""
    saving = _submit(worker, 10_000, iteration_s=0.05, hold=["saving", 15])
    wait_until(lambda: "held-saving" in _said(worker, saving), 60)
    worker.wait(saving, lambda run: run.iteration >= 14)
    asked = go_back(worker, saving, checkpoint(worker, saving, 10), iterations=12, scripted={})
    worker.wait_state(saving, "stopping")
    worker.release(saving)
    assert _done(worker, asked).status == "done"
    assert worker.wait_state(saving, *TERMINAL).state == "succeeded"
    assert checkpoint(worker, saving, 15), "what was half written is whole"
    assert segments(worker, saving) == [(1, "start", 0), (2, "rollback", 10)]

    loading = _submit(worker, 12, iteration_s=0.05)
    assert worker.wait_state(loading, *TERMINAL).state == "succeeded"
    first = go_back(worker, loading, checkpoint(worker, loading, 5), scripted={"loading_s": 60})
    assert _done(worker, first).status == "done"
    worker.wait_state(loading, "starting")
    wait_until(lambda: _said(worker, loading).count("start") == 2, 60)
    second = go_back(worker, loading, checkpoint(worker, loading, 10), scripted={})
    assert _done(worker, second).status == "done"
    run = worker.wait_state(loading, *TERMINAL)
    assert (run.state, run.iteration) == ("succeeded", 12)
    assert segments(worker, loading) == [(1, "start", 0), (2, "rollback", 5), (3, "rollback", 10)]
    assert newest_score(worker, loading) == (3, 12)


def test_a_worker_killed_before_anybody_looked_at_the_command(platform: Platform) -> None:
    """Supervisor and trainer die with it asked and nothing begun; whoever comes next carries it out."""
    worker = platform.start("worker.loop")
    run_id = _submit(platform, 10_000, iteration_s=0.05)
    platform.wait(run_id, lambda run: run.iteration >= 12)
    os.kill(platform.supervisor_pid(run_id), signal.SIGKILL)
    worker.kill()
    worker.wait()
    asked = go_back(platform, run_id, checkpoint(platform, run_id, 10), iterations=12)
    platform.start("worker.reconcile")
    platform.start("worker.loop")
    assert _done(platform, asked).status == "done"
    run = platform.wait_state(run_id, *TERMINAL)
    assert (run.state, run.iteration) == ("succeeded", 12)


def test_resume_goes_on_where_a_paused_and_a_stopped_run_stood(worker: Platform) -> None:
    runs = [_submit(worker, 200, iteration_s=0.05, checkpoint_every=1000) for _ in range(2)]
    for run_id, kind in zip(runs, ("pause", "stop"), strict=True):
        worker.wait(run_id, lambda run: run.iteration >= 3)
        with worker.sessions.begin() as session:
            request_command(session, run_id, kind, "ada", 30)
        worker.wait_state(run_id, "paused" if kind == "pause" else "stopped")
        with worker.sessions.begin() as session:
            request_requeue(session, run_id, "resume", "ada")
    for run_id in runs:
        run = worker.wait_state(run_id, "succeeded")
        assert (run.attempt, segments(worker, run_id)) == (2, [(1, "start", 0)])
        assert scores(worker, run_id) == {(1, True): list(range(1, 201))}


def test_a_run_waits_for_a_data_folder_that_is_away(worker: Platform) -> None:
    """T40: nothing is started without it, so nothing begins from nothing; it goes on once the folder is back."""
    run_id = _submit(worker, 10_000, iteration_s=0.02)
    worker.wait(run_id, lambda run: run.iteration >= 7)
    with worker.sessions.begin() as session:
        request_command(session, run_id, "pause", "ada", 30)
    stood = worker.wait_state(run_id, "paused").iteration
    aside = (worker.data / "runs").rename(worker.data / "aside")
    with worker.sessions.begin() as session:
        request_requeue(session, run_id, "resume", "ada")
    log = worker.data / "worker.loop.log"
    wait_until(lambda: f"nothing is started: PPO_DATA_DIR {worker.data} is not there" in log.read_text(), 60)
    assert (worker.run(run_id).state, (worker.data / "runs").exists()) == ("queued", False)
    aside.rename(worker.data / "runs")
    worker.wait(run_id, lambda run: run.iteration > stood)
    assert segments(worker, run_id) == [(1, "start", 0)]
    with worker.sessions() as session:
        assert set(session.scalars(select(Checkpoint.status).where(Checkpoint.run_id == run_id))) == {"good"}


def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before(worker: Platform) -> None:
    """P16: it takes the newest valid one, and says which it passed over and why."""
    run_id = _submit(worker, 100, iteration_s=0.05)
    worker.wait(run_id, lambda run: run.iteration >= 12)
    worker.stop(run_id)
    stopped_at = worker.wait_state(run_id, "stopped").iteration
    newest = checkpoint(worker, run_id, stopped_at)
    file = _flip(worker, newest)
    with worker.sessions.begin() as session:
        request_requeue(session, run_id, "resume", "ada")
    run = worker.wait_state(run_id, *TERMINAL)
    before = (stopped_at - 1) // 5 * 5
    assert (run.state, segments(worker, run_id)[1]) == ("succeeded", (2, "recovery", before))
    assert scores(worker, run_id) == {
        (1, True): list(range(1, before + 1)),
        (2, True): list(range(before + 1, 101)),
    }
    with worker.sessions() as session:
        reason = session.get_one(Segment, (run_id, 2)).reason or ""
    assert newest in reason
    assert str(file) in reason


def test_retry_takes_up_a_failed_run(worker: Platform) -> None:
    run_id = _submit(worker, 20, iteration_s=0.02, end_at=[12, 65])
    worker.wait_state(run_id, "failed")
    with worker.sessions.begin() as session:
        request_requeue(session, run_id, "retry", "ada")
    run = worker.wait(run_id, lambda run: run.state in TERMINAL and run.attempt == 2)
    assert (run.state, run.iteration) == ("succeeded", 20)


def test_a_checkpoint_asked_for_is_made_and_the_run_goes_on(worker: Platform) -> None:
    run_id = _submit(worker, 10_000, iteration_s=0.05, checkpoint_every=100_000)
    worker.wait(run_id, lambda run: run.iteration >= 2)
    with worker.sessions.begin() as session:
        command_id = request_command(session, run_id, "checkpoint", "ada", 30).id
    assert _done(worker, command_id).status == "done"
    begun = time.monotonic()
    worker.wait(run_id, lambda run: run.iteration >= 8)
    assert time.monotonic() - begun < 10
    with worker.sessions() as session:
        (saved,) = session.scalars(select(Checkpoint).where(Checkpoint.run_id == run_id))
    assert saved.reason == "command"
