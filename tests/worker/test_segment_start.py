"""Which segment an attempt runs, by what lies on disk and what the database knows."""

import pytest
from sqlalchemy import select

from ppo_core.errors import RunDirectoryError
from ppo_core.rundir import JournalWriter
from store.models import Checkpoint, RunEvent, Segment
from store.runs import LeaseLost
from tests.worker.conftest import Claimed


def test_first_attempt_makes_the_folder_from_the_stored_spec(claimed: Claimed) -> None:
    prepared = claimed.prepare()
    assert (prepared.attempt, prepared.start.segment, prepared.start.checkpoint) == (1, 1, None)
    assert prepared.folder.read_start().spec == {"checkpoints": {"keep_last": 2, "keep_best": 0}}
    assert claimed.run().supervisor_pid == 1


def test_old_claim_prepares_nothing(claimed: Claimed) -> None:
    claimed.lose()
    claimed.claim()
    claimed.token = 1
    with pytest.raises(LeaseLost):
        claimed.prepare()


def _metrics(claimed: Claimed, up_to: int) -> None:
    journal = JournalWriter(claimed.segment().journal)
    for iteration in range(1, up_to + 1):
        journal.append("metrics", iteration, {"a": 1.0})
    journal.close()


def test_undelivered_journal_and_unannounced_checkpoint_are_taken_up(claimed: Claimed) -> None:
    """The trainer died between renaming the checkpoint and saying so; the supervisor with it."""
    claimed.prepare()
    _metrics(claimed, up_to=5)
    claimed.save(5)
    claimed.lose()
    claimed.claim()
    prepared = claimed.prepare()
    assert (prepared.attempt, prepared.start.segment) == (2, 1)
    assert claimed.run().iteration == 5
    with claimed.sessions() as session:
        found = session.scalars(select(Checkpoint)).one()
        assert (found.iteration, found.path, found.lease_token) == (5, "segment-0001/checkpoints/iter-000005", 2)
        assert "checkpoint" in session.scalars(select(RunEvent.type)).all()


def test_going_back_opens_a_segment_that_names_its_checkpoint(claimed: Claimed) -> None:
    claimed.prepare()
    _metrics(claimed, up_to=8)
    claimed.save(5)
    claimed.lose()
    claimed.claim()
    prepared = claimed.prepare()
    assert prepared.start.segment == 2
    assert prepared.start.checkpoint == str(claimed.segment().checkpoint(5))
    run = claimed.run()
    assert (run.active_segment, run.iteration) == (2, 5)
    with claimed.sessions() as session:
        segment = session.get_one(Segment, (claimed.run_id, 2))
        assert (segment.kind, segment.start_iteration) == ("recovery", 5)
        assert session.get_one(Checkpoint, segment.start_checkpoint).iteration == 5


def test_folder_that_was_never_made_is_made_by_the_next_attempt(claimed: Claimed) -> None:
    """The crash came between the new segment's row and its folder."""
    claimed.prepare()
    _metrics(claimed, up_to=8)
    claimed.save(5)
    claimed.lose()
    claimed.claim()
    before = claimed.prepare()
    before.folder.spec.unlink()
    for folder in sorted(before.folder.path.rglob("*"), reverse=True):
        folder.rmdir()
    before.folder.path.rmdir()
    claimed.lose()
    claimed.claim()
    again = claimed.prepare()
    assert again.start == before.start
    assert again.folder.spec.exists()


def test_damaged_journal_is_told(claimed: Claimed) -> None:
    claimed.prepare()
    claimed.segment().journal.write_text("not json\n")
    claimed.lose()
    claimed.claim()
    with pytest.raises(RunDirectoryError, match="not a journal line"):
        claimed.prepare()


def test_a_run_whose_folder_is_away_does_not_begin_from_nothing(claimed: Claimed) -> None:
    claimed.prepare()
    _metrics(claimed, up_to=5)
    claimed.save(5)
    claimed.lose()
    claimed.claim()
    claimed.prepare()  # which brings the journal to the database
    claimed.lose()
    claimed.claim()
    aside = claimed.run_dir.rename(claimed.data / "aside")
    with pytest.raises(RunDirectoryError, match="is the right disk mounted") as refused:
        claimed.prepare()
    assert "retry the run" in refused.value.hint
    assert not claimed.run_dir.exists()
    with claimed.sessions() as session:
        assert session.scalars(select(Checkpoint)).one().status == "good"

    claimed.segment().path.mkdir(parents=True)  # somebody made another one in its place
    with pytest.raises(RunDirectoryError, match="is not the folder that the run trained in"):
        claimed.prepare()
    claimed.segment().path.rmdir()
    claimed.run_dir.rmdir()
    aside.rename(claimed.run_dir)
    assert claimed.prepare().start.segment == 1


def test_a_start_from_a_folder_that_is_away_is_refused(claimed: Claimed) -> None:
    """The new segment has no folder yet, and the one that its checkpoint lies in is not there."""
    claimed.prepare()
    _metrics(claimed, up_to=8)
    claimed.save(5)
    claimed.lose()
    claimed.claim()
    made = claimed.prepare()
    made.folder.path.rename(claimed.data / "new")
    claimed.segment().path.rename(claimed.data / "old")
    claimed.lose()
    claimed.claim()
    with pytest.raises(RunDirectoryError, match="segment-0001 is not there"):
        claimed.prepare()
    assert not made.folder.path.exists()


def test_segment_that_is_still_written_is_left_to_its_writer(claimed: Claimed) -> None:
    """The trainer of a lost attempt, on a machine that nobody reaches: two must not write one journal."""
    claimed.prepare()
    writer = JournalWriter(claimed.segment().journal)
    claimed.save(3)
    claimed.lose()
    claimed.claim()
    start = claimed.prepare().start
    assert (start.segment, start.checkpoint) == (2, str(claimed.segment().checkpoint(3)))
    writer.close()
    claimed.lose()
    claimed.claim()
    assert claimed.prepare().start.segment == 2
