"""The worker's look at the queue, without any process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from store.ids import new_id
from store.models import Run
from store.runs import create_run
from worker.loop import Looker
from worker.settings import WorkerSettings


def test_a_supervisor_that_cannot_be_started_costs_one_run_an_attempt_and_the_worker_nothing(
    database_url: str, tmp_path: Path
) -> None:
    settings = WorkerSettings(DATABASE_URL=database_url, data_dir=tmp_path, worker_id="here", cpu_slots=4)
    looker = Looker(settings)
    looker.register()
    run_ids = [new_id("r") for _ in range(2)]
    for run_id in run_ids:  # a transaction each: runs of one and the same instant are claimed in no order of ours
        with looker.sessions.begin() as session:
            create_run(session, run_id=run_id, name="n", spec={}, num_iterations=5, priority=0, gpus=0, created_by=None)
        settings.run_dir(run_id).write_text("no folder can be made here")
    for claimed in (1, 2):  # one a look: what keeps the first from starting would keep all others, too
        assert looker.look() == 0
        with looker.sessions() as session:
            states = [session.get_one(Run, run_id).state for run_id in run_ids]
        assert states == ["starting"] * claimed + ["queued"] * (2 - claimed)
    looker.engine.dispose()


def test_a_celery_worker_whose_look_breaks_leaves() -> None:
    """P09: alive for the process list and deaf for the queue is what nobody restarts."""
    program = """
import worker.app

class Broken:
    def run(self):
        raise RuntimeError("a fault of ours")

worker.app._look_or_leave(Broken())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 70
    assert "a fault of ours" in done.stderr
