"""The folders of deleted runs: removed some at a time, however often interrupted, and nothing beside them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from store.deletion import delete_run, deleted_runs
from store.runs import transition
from tests.worker.conftest import Claimed
from worker import housekeeping
from worker.folders import remove_some
from worker.housekeeping import Housekeeping
from worker.settings import WorkerSettings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "r-1"
    for number in range(5):
        (folder / f"segment-{number}" / "logs").mkdir(parents=True)
        (folder / f"segment-{number}" / "logs" / "a.log").write_text("x")
    return folder


def test_a_folder_goes_part_by_part(folder: Path) -> None:
    looks = 0
    while not remove_some(folder, until=time.monotonic()):
        looks += 1
        assert looks < 20
    assert not folder.exists()
    assert looks == 5, "a file each"
    assert remove_some(folder, until=time.monotonic()), "what is gone is gone"


def test_links_are_removed_and_what_they_name_stays(folder: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("precious")
    (folder / "to a folder").symlink_to(kept)
    (folder / "to a file").symlink_to(kept / "file")
    assert remove_some(folder, until=time.monotonic() + 60)
    assert (kept / "file").read_text() == "precious"
    link = tmp_path / "r-2"
    link.symlink_to(kept)
    assert remove_some(link, until=time.monotonic() + 60)
    assert (kept / "file").exists()


def test_the_folder_of_a_deleted_run_goes_and_its_row_after_it(
    claimed: Claimed, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is away, or a look that is cut short as by a crash, leaves the run listed; the next one ends it."""
    claimed.prepare()
    claimed.save(10)
    with claimed.sessions.begin() as session:
        transition(session, claimed.run_id, "failed")
        delete_run(session, claimed.run_id, "ada")
    other = claimed.data / "runs" / "r-other"
    other.mkdir()
    keeping = Housekeeping(claimed.sessions, WorkerSettings(database_url=database_url, data_dir=claimed.data))
    away = (claimed.data / "runs").rename(claimed.data / "not mounted")
    keeping.look()
    away.rename(claimed.data / "runs")
    with monkeypatch.context() as patch:
        patch.setattr(housekeeping, "LOOK_S", 0.0)
        keeping.look()
    with claimed.sessions() as session:
        assert deleted_runs(session) == [claimed.run_id]
    assert claimed.run_dir.exists()
    keeping.look()
    with claimed.sessions() as session:
        assert deleted_runs(session) == []
    assert not claimed.run_dir.exists()
    assert other.exists()


def test_what_cannot_be_removed_is_told_once_and_holds_up_nothing(
    claimed: Claimed, database_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed.prepare()
    with claimed.sessions.begin() as session:
        transition(session, claimed.run_id, "failed")
        delete_run(session, claimed.run_id, None)

    def refuses(folder: Path, until: float) -> bool:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(housekeeping, "remove_some", refuses)
    keeping = Housekeeping(claimed.sessions, WorkerSettings(database_url=database_url, data_dir=claimed.data))
    keeping.look()
    keeping.look()
    told = [record for record in caplog.records if "cannot be removed" in record.getMessage()]
    assert len(told) == 1
    assert str(claimed.run_dir) in told[0].getMessage()
    with claimed.sessions() as session:
        assert deleted_runs(session) == [claimed.run_id]
