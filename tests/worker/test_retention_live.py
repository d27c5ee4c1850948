"""Retention with real processes: checkpoints come and go while a run trains, is lost, and goes on."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from store.checkpoints import change_checkpoint, locked_checkpoint
from store.models import Checkpoint, Segment
from store.retention import remove_by_hand
from tests.worker.checkpoint_agreement import disagreements
from tests.worker.platform import Platform, wait_until

pytestmark = pytest.mark.stack


@pytest.fixture
def platform(database_url: str, tmp_path: Path) -> Iterator[Platform]:
    with Platform(database_url, tmp_path) as platform:
        platform.start("worker.loop")
        platform.start("worker.reconcile")
        yield platform


def row_of(session: Session, run_id: str, iteration: int) -> Checkpoint | None:
    return session.scalar(
        select(Checkpoint).where(Checkpoint.run_id == run_id, Checkpoint.iteration == iteration).limit(1)
    )


def test_what_is_needed_stays_and_all_else_goes_through_a_loss(platform: Platform) -> None:
    """P17: keep four of many, one pinned, one deleted by a person, the supervisor killed in between."""
    run_id = platform.submit_spec(
        {
            "iterations": 40,
            "training": {"ranks": 1},
            "scripted": {"checkpoint_every": 2, "iteration_s": 0.2},
            "checkpoints": {"keep_last": 4, "keep_best": 0},
        }
    )
    run_dir = platform.data / "runs" / run_id

    def saved(iteration: int) -> bool:
        with platform.sessions() as session:
            return row_of(session, run_id, iteration) is not None

    wait_until(lambda: saved(4), 60)
    with platform.sessions.begin() as session:
        four = row_of(session, run_id, 4)
        assert four is not None
        pinned = locked_checkpoint(session, run_id, four.id)
        assert pinned is not None
        change_checkpoint(session, pinned, "pinned", "ada", pinned=True)
    wait_until(lambda: saved(10), 60)
    os.kill(platform.run(run_id).supervisor_pid or 0, signal.SIGKILL)
    run = platform.wait(run_id, lambda run: run.attempt == 2 and run.state == "running", 60)
    wait_until(lambda: saved(22), 60)
    with platform.sessions.begin() as session:
        deleted = row_of(session, run_id, 18)
        assert deleted is not None
        held = locked_checkpoint(session, run_id, deleted.id)
        if held is not None and held.status == "good":
            remove_by_hand(session, held, "ada")
    run = platform.wait_state(run_id, "succeeded", "failed", timeout_s=60)
    assert run.state == "succeeded", platform.logs(run_id)

    def kept() -> tuple[list[int], list[int]]:
        """Iterations of what is pinned, and of what is neither that nor started from; every start is there."""
        with platform.sessions() as session:
            good = session.scalars(
                select(Checkpoint).where(Checkpoint.run_id == run_id, Checkpoint.status == "good").order_by("iteration")
            ).all()
            starts = set(session.scalars(select(Segment.start_checkpoint).where(Segment.run_id == run_id)))
        assert {row.id for row in good} >= starts - {None}
        others = [row.iteration for row in good if not row.pinned and row.id not in starts]
        return [row.iteration for row in good if row.pinned], others

    # The run is pruned once more after its end, and then the trainer uses nothing any longer.
    wait_until(lambda: kept() == ([4], [34, 36, 38, 40]), 60)
    wait_until(lambda: not list(disagreements(platform.sessions, run_dir)), 30)


def test_a_reconciler_that_starts_finds_what_happened_while_nobody_looked(platform: Platform) -> None:
    """Files taken away by hand, and a row that says removed: both are put right for a run at rest."""
    run_id = platform.submit_spec(
        {
            "iterations": 8,
            "training": {"ranks": 1},
            "scripted": {"checkpoint_every": 2, "iteration_s": 0.02},
            "checkpoints": {"keep_last": -1, "keep_best": 0},
        }
    )
    platform.wait_state(run_id, "succeeded", timeout_s=60)
    run_dir = platform.data / "runs" / run_id
    wait_until(lambda: not list(disagreements(platform.sessions, run_dir)), 30)
    platform.processes[1].kill()
    platform.processes[1].wait()
    shutil.rmtree(run_dir / "segment-0001" / "checkpoints" / "iter-000002")
    with platform.sessions.begin() as session:
        session.execute(update(Checkpoint).where(Checkpoint.iteration == 4).values(status="removed"))
    assert len(list(disagreements(platform.sessions, run_dir))) == 2
    platform.start("worker.reconcile")
    wait_until(lambda: not list(disagreements(platform.sessions, run_dir)), 30)
    with platform.sessions() as session:
        statuses = session.execute(
            select(Checkpoint.iteration, Checkpoint.status).where(Checkpoint.run_id == run_id).order_by("iteration")
        ).all()
    assert [tuple(row) for row in statuses] == [(2, "removed"), (4, "removed"), (6, "good"), (8, "good")]
