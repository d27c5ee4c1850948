"""Runs go only to workers that see the platform's data folder."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from store import workers
from store.fleet import worker_standing
from store.ids import new_id
from store.models import Run
from store.runs import create_run
from store.waiting import waiting_reasons
from tests.faults.small_disk import can_be_mounted
from worker.data_folder import folder_id
from worker.loop import Looker
from worker.reconcile import Reconciler
from worker.settings import WorkerSettings

MakeLooker = Callable[[str, Path], Looker]


@pytest.fixture
def looker(database_url: str) -> Iterator[MakeLooker]:
    made = []

    def make(worker_id: str, folder: Path) -> Looker:
        folder.mkdir(exist_ok=True)
        looker = Looker(WorkerSettings(DATABASE_URL=database_url, data_dir=folder, worker_id=worker_id))
        made.append(looker)
        looker.register()
        return looker

    yield make
    for looker in made:
        looker.engine.dispose()


def _queue(looker: Looker) -> str:
    """A run whose supervisor cannot be started there: that it was claimed is all that happens to it."""
    run_id = new_id("r")
    with looker.sessions.begin() as session:
        create_run(session, run_id=run_id, name="n", spec={}, num_iterations=5, priority=0, gpus=0, created_by=None)
    looker.settings.run_dir(run_id).write_text("no folder can be made here")
    return run_id


def _state(looker: Looker, run_id: str) -> str:
    with looker.sessions() as session:
        return session.get_one(Run, run_id).state


def _fault(looker: Looker) -> str | None:
    with looker.sessions() as session:
        standing = worker_standing(session, looker.settings.worker_id)
        assert standing is not None
        return standing.worker.folder_fault


def test_a_worker_with_another_data_folder_takes_no_run_and_says_why(looker: MakeLooker, tmp_path: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    first = looker("first", right)
    first.look()
    assert _fault(first) is None
    stray = looker("stray", wrong)
    run_id = _queue(stray)
    stray.look()
    assert _state(stray, run_id) == "queued"
    told = _fault(stray)
    assert told is not None
    for part in (f"PPO_DATA_DIR {wrong}", folder_id(wrong), folder_id(right), "named by worker first", "mount"):
        assert part in told
    with stray.sessions.begin() as session:
        workers.set_state(session, "first", "gone")
    with stray.sessions() as session:
        reasons = waiting_reasons(session, [session.get_one(Run, run_id)], datetime.now(UTC))
    assert reasons[run_id] == f"Worker stray takes no run: {told}"
    (wrong / "folder-id").write_text(folder_id(right))
    stray.look()
    assert _fault(stray) is None
    assert _state(stray, run_id) == "starting"


def test_a_folder_that_is_mounted_elsewhere_is_the_same(looker: MakeLooker, tmp_path: Path) -> None:
    first = looker("first", tmp_path / "here")
    first.look()
    (tmp_path / "there").symlink_to(tmp_path / "here")
    second = looker("second", tmp_path / "there")
    run_id = _queue(second)
    second.look()
    assert _state(second, run_id) == "starting"


def test_a_folder_that_goes_while_the_worker_lives_is_told(looker: MakeLooker, tmp_path: Path) -> None:
    worker = looker("w", tmp_path / "data")
    worker.look()
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    worker.look()
    assert "is not there" in str(_fault(worker))
    (tmp_path / "elsewhere").rename(tmp_path / "data")
    worker.look()
    assert _fault(worker) is None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A data folder of 24 MiB on a disk of its own."""
    if not can_be_mounted():
        pytest.skip("takes root")
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_that_takes_nothing_leaves_the_queue_alone(looker: MakeLooker, small_disk: Path) -> None:
    """Else every queued run is claimed, and comes to rest, within minutes."""
    worker = looker("w", small_disk)
    run_id = _queue(worker)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(20 * 2**20))
    worker.look()
    assert _state(worker, run_id) == "queued"
    assert "full: 4.0 MiB are free" in str(_fault(worker))
    filler.unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    worker.look()
    assert _state(worker, run_id) == "queued"
    assert "read-only" in str(_fault(worker))
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    worker.look()
    assert (_state(worker, run_id), _fault(worker)) == ("starting", None)


def test_the_reconciler_decides_nothing_by_another_folder(
    looker: MakeLooker, tmp_path: Path, database_url: str
) -> None:
    looker("first", tmp_path / "right").look()
    for name, right in (("right", True), ("wrong", False)):
        (tmp_path / name).mkdir(exist_ok=True)
        reconciler = Reconciler(WorkerSettings(DATABASE_URL=database_url, data_dir=tmp_path / name, poll_s=0.01))
        assert reconciler._has_the_right_folder() is right
        reconciler.engine.dispose()


def test_a_folder_gets_one_id_however_many_ask_at_once(tmp_path: Path) -> None:
    for round_number in range(20):
        folder = tmp_path / str(round_number)
        folder.mkdir()
        with ThreadPoolExecutor(8) as pool:
            assert len(set(pool.map(folder_id, [folder] * 8))) == 1
        assert [path.name for path in folder.iterdir()] == ["folder-id"]
