"""After a death at any point between a checkpoint's row and its files, both say the same again: P17, T24."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import event, select, update

from ppo_core.rundir import check_stored, checkpoints, new_checkpoint, segments
from store.checkpoints import NewCheckpoint, record_checkpoint, record_verification
from store.models import Checkpoint, Run, RunEvent
from store.retention import rules_of
from store.runs import locked_run, transition
from store.session import make_engine, session_factory
from tests.worker.checkpoint_agreement import disagreements
from tests.worker.conftest import Claimed
from worker.housekeeping import Housekeeping
from worker.prune import Pruner
from worker.settings import WorkerSettings

PROGRAM = Path(__file__).parent / "killed_remover.py"


@pytest.fixture
def saved(claimed: Claimed) -> Claimed:
    """Checkpoints at 5, 10, 15, 20, of which two stay."""
    claimed.prepare()
    for iteration in (5, 10, 15, 20):
        record(claimed, iteration)
    return claimed


def record(claimed: Claimed, iteration: int) -> None:
    said = claimed.save(iteration)
    new = NewCheckpoint(segment=1, iteration=iteration, path=f"segment-0001/{said.pop('path')}", **said)
    with claimed.sessions.begin() as session:
        record_checkpoint(session, claimed.run_id, new, claimed.token)


@pytest.fixture
def housekeeping(claimed: Claimed, database_url: str) -> Housekeeping:
    settings = WorkerSettings(database_url=database_url, data_dir=claimed.data)
    return Housekeeping(claimed.sessions, settings)


def rest(claimed: Claimed) -> None:
    """The attempt is over; nobody looks after the run."""
    with claimed.sessions.begin() as session:
        transition(session, claimed.run_id, "stopping")
        transition(session, claimed.run_id, "stopped")


def iterations(claimed: Claimed) -> list[int]:
    return [int(path.name[5:]) for segment in segments(claimed.run_dir) for path in checkpoints(segment)]


@pytest.mark.parametrize(
    ("point", "after"),
    [
        ("row", "reconciler"),
        ("rename", "reconciler"),
        ("half", "reconciler"),
        ("files", "reconciler"),
        ("row", "next attempt"),
        ("half", "next attempt"),
    ],
)
def test_a_removal_that_was_cut_off_is_finished(
    saved: Claimed, housekeeping: Housekeeping, database_url: str, point: str, after: str
) -> None:
    """Killed after the row said removed, after the rename, among the files, and before the row says that they went."""
    arguments = [point, database_url, saved.run_id, str(saved.token), str(saved.run_dir)]
    killed = subprocess.run(
        [sys.executable, "-P", str(PROGRAM), *arguments], check=False, capture_output=True, text=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with saved.sessions() as session:
        status = session.scalars(select(Checkpoint.status).where(Checkpoint.iteration == 5)).one()
    assert status == "removed", "the row says so before the first file goes"
    assert list(disagreements(saved.sessions, saved.run_dir))
    if after == "reconciler":
        rest(saved)
        housekeeping.look()
        assert iterations(saved) == [10, 15, 20], "it finishes what was begun and removes nothing more"
    else:
        saved.lose()
        saved.claim()
        rules = {"keep_last": 2, "keep_best": 0}
        Pruner(saved.sessions, saved.run_id, saved.token, saved.run_dir, rules_of({"checkpoints": rules})).prune()
        assert iterations(saved) == [15, 20]
    assert list(disagreements(saved.sessions, saved.run_dir)) == []


def test_a_checkpoint_whose_row_was_never_written_is_taken_up(saved: Claimed, housekeeping: Housekeeping) -> None:
    """Killed between the rename and the row: whole files without a row, and a half-written folder beside them."""
    saved.save(25)
    half = saved.segment().checkpoints / ".iter-000030.77.tmp"
    shutil.copytree(saved.segment().checkpoint(20), half)
    housekeeping.look()
    assert half.exists(), "its trainer may be alive"
    rest(saved)
    assert list(disagreements(saved.sessions, saved.run_dir))
    Housekeeping(saved.sessions, housekeeping._settings).look()
    assert list(disagreements(saved.sessions, saved.run_dir)) == []
    with saved.sessions() as session:
        row = session.scalars(select(Checkpoint).where(Checkpoint.iteration == 25)).one()
        told = session.scalars(select(RunEvent.payload).where(RunEvent.type == "checkpoint")).all()
    assert (row.status, row.lease_token) == ("good", saved.token)
    assert row.id in [payload["id"] for payload in told]


def test_a_run_whose_row_somebody_holds_is_looked_through_later(saved: Claimed, database_url: str) -> None:
    """It says nothing of the database, which the reconciler would else take for away."""
    saved.save(25)
    rest(saved)
    engine = make_engine(database_url)
    event.listen(engine, "connect", lambda raw, _: raw.execute("SET lock_timeout = '200ms'").close())
    settings = WorkerSettings(database_url=database_url, data_dir=saved.data)
    housekeeping = Housekeeping(session_factory(engine), settings)
    with saved.sessions() as person:
        locked_run(person, saved.run_id)
        housekeeping.look()
        assert list(disagreements(saved.sessions, saved.run_dir))
    housekeeping.look()
    assert list(disagreements(saved.sessions, saved.run_dir)) == []
    engine.dispose()


def test_one_that_cannot_be_read_is_not_taken_up_and_stops_nobody(saved: Claimed, housekeeping: Housekeeping) -> None:
    """T24: a folder of the right name is not trusted, and nobody has to delete it by hand."""
    (saved.segment().checkpoint(25)).mkdir()
    (saved.segment().checkpoint(25) / "manifest.json").write_text("{")
    saved.save(30)
    rest(saved)
    housekeeping.look()
    with saved.sessions() as session:
        known = session.scalars(select(Checkpoint.iteration).order_by(Checkpoint.iteration)).all()
    assert known == [5, 10, 15, 20, 30]


def test_a_row_whose_files_went_says_so(saved: Claimed, housekeeping: Housekeeping) -> None:
    shutil.rmtree(saved.segment().checkpoint(15))
    rest(saved)
    housekeeping.look()
    with saved.sessions() as session:
        row = session.scalars(select(Checkpoint).where(Checkpoint.iteration == 15)).one()
        told = session.scalars(select(RunEvent).where(RunEvent.type == "checkpoint").order_by(RunEvent.seq)).all()
    assert (row.status, row.files_gone) == ("removed", True)
    assert told[-1].payload["status_detail"] == row.status_detail
    assert list(disagreements(saved.sessions, saved.run_dir)) == []


def test_when_none_is_there_they_are_damaged_until_the_disk_is_back(saved: Claimed, housekeeping: Housekeeping) -> None:
    rest(saved)
    folder = saved.segment().checkpoints
    folder.rename(saved.data / "away")
    folder.mkdir()
    housekeeping.look()
    with saved.sessions() as session:
        rows = session.scalars(select(Checkpoint)).all()
    assert {row.status for row in rows} == {"damaged"}
    assert "is the right disk mounted" in str(rows[0].status_detail)
    folder.rmdir()
    (saved.data / "away").rename(folder)
    with saved.sessions.begin() as session:
        for row in rows:
            check_stored(saved.run_dir, row.path, row.manifest_sha256)
            record_verification(session, saved.run_id, row.id, None)
    assert list(disagreements(saved.sessions, saved.run_dir)) == []
    with saved.sessions() as session:
        assert set(session.scalars(select(Checkpoint.status))) == {"good"}


def test_what_a_person_deleted_goes_also_while_the_run_trains(saved: Claimed, housekeeping: Housekeeping) -> None:
    housekeeping.look()
    with saved.sessions.begin() as session:
        session.execute(update(Checkpoint).where(Checkpoint.iteration == 10).values(status="removed"))
    housekeeping.look()
    assert iterations(saved) == [5, 15, 20]
    assert list(disagreements(saved.sessions, saved.run_dir)) == []


def test_files_that_cannot_be_removed_do_not_keep_the_others(saved: Claimed, housekeeping: Housekeeping) -> None:
    with saved.sessions.begin() as session:
        session.execute(update(Checkpoint).where(Checkpoint.iteration.in_([5, 10])).values(status="removed"))
        session.execute(update(Checkpoint).where(Checkpoint.iteration == 5).values(path="../5"))
    housekeeping.look()
    assert iterations(saved) == [5, 15, 20]


def test_a_run_that_cannot_be_looked_through_does_not_keep_the_others(
    saved: Claimed, housekeeping: Housekeeping
) -> None:
    rest(saved)
    with saved.sessions.begin() as session:
        other = Run(id="a-file", name="x", spec={}, num_iterations=1, attempt=1, state="stopped")
        session.add(other)
    (saved.data / "runs" / "a-file").write_text("no folder")
    saved.save(25)
    housekeeping.look()
    assert list(disagreements(saved.sessions, saved.run_dir)) == []


def test_a_new_save_is_whole_or_absent_while_others_look(saved: Claimed) -> None:
    """P17: the pruner looks in the middle of a save; what is being written is neither counted nor touched."""
    pruner = Pruner(saved.sessions, saved.run_id, saved.token, saved.run_dir, rules_of({}))
    with new_checkpoint(saved.segment().checkpoint(25)) as folder:
        (folder / "state.json").write_text("25")
        pruner.prune()
        (folder / "weights").write_text("w")
        pruner.prune()
    pruner.prune()
    assert iterations(saved) == [10, 15, 20, 25]
    saved.lose()
    saved.claim()
    saved.prepare()
    assert list(disagreements(saved.sessions, saved.run_dir)) == []
