"""Checkpoints go by the rules, never before a newer one was verified, never when pinned or started from."""

from collections.abc import Callable

import pytest
from sqlalchemy import select, update

from store.checkpoints import NewCheckpoint, record_checkpoint
from store.models import Checkpoint, Segment
from store.retention import rules_of
from tests.worker.conftest import Claimed
from worker.prune import Pruner

SPEC = {"checkpoints": {"keep_last": 2, "keep_best": 0}}


@pytest.fixture
def saved(claimed: Claimed) -> Claimed:
    """Checkpoints at 5, 10, 15, 20."""
    claimed.prepare()
    with claimed.sessions.begin() as session:
        for iteration in (5, 10, 15, 20):
            said = claimed.save(iteration)
            path = f"segment-0001/{said.pop('path')}"
            new = NewCheckpoint(segment=1, iteration=iteration, path=path, **said)
            record_checkpoint(session, claimed.run_id, new, claimed.token)
    return claimed


@pytest.fixture
def prune(saved: Claimed) -> Callable[[], list[int]]:
    pruner = Pruner(saved.sessions, saved.run_id, saved.token, saved.run_dir, rules_of(SPEC))

    def prune() -> list[int]:
        gone = pruner.prune()
        with saved.sessions() as session:
            return sorted(session.scalars(select(Checkpoint.iteration).where(Checkpoint.id.in_(gone))))

    return prune


def _on_disk(saved: Claimed) -> list[int]:
    return sorted(int(path.name[5:]) for path in saved.segment().checkpoints.iterdir())


def _change(saved: Claimed, iteration: int, **values: object) -> None:
    with saved.sessions.begin() as session:
        session.execute(update(Checkpoint).where(Checkpoint.iteration == iteration).values(**values))


def test_older_ones_go(saved: Claimed, prune: Callable[[], list[int]]) -> None:
    assert prune() == [5, 10]
    assert _on_disk(saved) == [15, 20]
    assert prune() == []


def test_pinned_and_started_from_stay(saved: Claimed, prune: Callable[[], list[int]]) -> None:
    _change(saved, 5, pinned=True)
    with saved.sessions.begin() as session:
        ten = session.scalars(select(Checkpoint.id).where(Checkpoint.iteration == 10)).one()
        session.add(Segment(run_id=saved.run_id, number=2, kind="rollback", spec={}, start_checkpoint=ten))
    assert prune() == []


def test_damaged_newest_protects_the_older_ones(saved: Claimed, prune: Callable[[], list[int]]) -> None:
    (saved.segment().checkpoint(20) / "state.json").write_text("xx")
    assert prune() == [5]
    with saved.sessions() as session:
        row = session.scalars(select(Checkpoint).where(Checkpoint.iteration == 20)).one()
    assert row.status == "damaged"
    assert "state.json" in str(row.status_detail)


def test_nothing_goes_when_none_can_be_verified(saved: Claimed, prune: Callable[[], list[int]]) -> None:
    for iteration in (5, 10, 15, 20):
        (saved.segment().checkpoint(iteration) / "state.json").unlink()
    assert prune() == []


def test_who_lost_the_lease_removes_nothing(saved: Claimed, prune: Callable[[], list[int]]) -> None:
    saved.lose()
    saved.claim()
    assert prune() == []
    assert _on_disk(saved) == [5, 10, 15, 20]


def test_files_left_by_a_crash_after_the_row_go_too(saved: Claimed, prune: Callable[[], list[int]]) -> None:
    _change(saved, 5, status="removed")
    assert prune() == [10]
    assert _on_disk(saved) == [15, 20]


def test_unreadable_rules_keep_everything() -> None:
    assert rules_of({"checkpoints": {"keep_last": "many"}}).keep_last == -1
