"""Checkpoints go by the rules, never before a newer one was verified, never when pinned or started from."""

import shutil
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import delete, func, select, update

from api.routes.checkpoints import preview_gc
from ppo_core.rundir import StorageAwayError
from ppo_core.spec.groups import CheckpointsConfig
from store import retention
from store.checkpoints import NewCheckpoint, record_checkpoint
from store.metrics_write import IterationMetrics, write_metrics
from store.models import Checkpoint, Command, MetricPoint, Run, RunEvent, Segment
from store.retention import rules_of
from store.runs import transition
from tests.worker.conftest import Claimed
from tests.worker.platform import wait_until
from worker.attempt import Attempt
from worker.attempt_view import AttemptView
from worker.delivery import Delivery
from worker.outcome import Outcome
from worker.prune import Pruner
from worker.settings import WorkerSettings
from worker.supervise import Supervisor
from worker.trainer_process import TrainerProcesses

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


def test_what_undoes_a_roll_back_stays_but_a_person_may_delete_it(
    saved: Claimed, prune: Callable[[], list[int]]
) -> None:
    """Segment 2 went back to 5, left 20 behind, and has saved enough to fill `keep_last`."""
    with saved.sessions.begin() as session:
        five = session.scalars(select(Checkpoint).where(Checkpoint.iteration == 5)).one()
        session.add(
            Segment(
                run_id=saved.run_id,
                number=2,
                kind="rollback",
                spec=SPEC,
                start_checkpoint=five.id,
                start_iteration=five.iteration,
            )
        )
        session.execute(update(Checkpoint).values(verified_at=func.now()))
        session.flush()
        for iteration in (7, 9):
            said = saved.save(iteration, 2)
            path = f"segment-0002/{said.pop('path')}"
            record_checkpoint(
                session, saved.run_id, NewCheckpoint(segment=2, iteration=iteration, path=path, **said), saved.token
            )
        session.execute(update(Run).values(active_segment=2))
    assert prune() == [10, 15]
    with saved.sessions.begin() as session:
        twenty = session.scalars(select(Checkpoint).where(Checkpoint.iteration == 20)).one()
        retention.remove_by_hand(session, twenty, "somebody")
        assert twenty.status == "removed"


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


def test_what_a_rule_removed_is_told_with_the_reason(saved: Claimed, prune: Callable[[], list[int]]) -> None:
    prune()
    with saved.sessions() as session:
        told = session.scalars(select(RunEvent).where(RunEvent.type == "checkpoint").order_by(RunEvent.seq)).all()
        rows = session.scalars(select(Checkpoint).order_by(Checkpoint.iteration)).all()
    assert [(event.iteration, event.payload["change"]) for event in told] == [(5, "removed"), (10, "removed")]
    assert {event.payload["status_detail"] for event in told} == {"no rule keeps it; a newer one is verified"}
    assert [(row.status, row.files_gone) for row in rows] == [("removed", True)] * 2 + [("good", False)] * 2
    assert [row.verified_at is not None for row in rows] == [False, False, False, True]


def test_what_was_verified_once_is_not_read_again(saved: Claimed, prune: Callable[[], list[int]]) -> None:
    """Hashing a large one takes minutes: the row remembers it for the next attempt."""
    _change(saved, 20, verified_at=func.now())
    (saved.segment().checkpoint(20) / "state.json").write_text("damaged since")
    assert prune() == [5, 10]


def test_another_manifest_than_the_recorded_one_is_damage(saved: Claimed, prune: Callable[[], list[int]]) -> None:
    _change(saved, 20, manifest_sha256="0" * 64)
    assert prune() == [5]
    with saved.sessions() as session:
        detail = session.scalars(select(Checkpoint.status_detail).where(Checkpoint.iteration == 20)).one()
    assert "manifest.json has SHA-256" in str(detail)


def test_files_that_somebody_took_away_are_recorded_and_do_not_block_the_rest(
    saved: Claimed, prune: Callable[[], list[int]]
) -> None:
    """P17: one checkpoint's files are deleted by hand; the others go by the rules."""
    shutil.rmtree(saved.segment().checkpoint(15))
    assert prune() == [5]
    with saved.sessions() as session:
        row = session.scalars(select(Checkpoint).where(Checkpoint.iteration == 15)).one()
    assert (row.status, row.files_gone) == ("removed", True)
    assert "not PPO Control" in str(row.status_detail)


def test_a_disk_that_is_not_there_takes_nothing_away(saved: Claimed, prune: Callable[[], list[int]]) -> None:
    saved.run_dir.rename(saved.data / "unmounted")
    with pytest.raises(StorageAwayError):
        prune()
    with saved.sessions() as session:
        assert set(session.scalars(select(Checkpoint.status))) == {"good"}
    (saved.data / "unmounted").rename(saved.run_dir)
    assert _on_disk(saved) == [5, 10, 15, 20]


def test_a_fault_of_one_look_is_not_the_end_of_pruning(saved: Claimed, monkeypatch: pytest.MonkeyPatch) -> None:
    pruner = Pruner(saved.sessions, saved.run_id, saved.token, saved.run_dir, rules_of(SPEC))
    looks: list[int] = []

    def prune() -> list[str]:
        looks.append(len(looks))
        if len(looks) == 1:
            raise MemoryError
        return []

    monkeypatch.setattr(pruner, "prune", prune)
    pruner.look()
    wait_until(lambda: len(looks) == 1)
    pruner.look()
    wait_until(lambda: len(looks) == 2)


def test_after_the_last_save_one_more_look_is_waited_for(saved: Claimed, monkeypatch: pytest.MonkeyPatch) -> None:
    pruner = Pruner(saved.sessions, saved.run_id, saved.token, saved.run_dir, rules_of(SPEC))
    pruner.finish(lambda: False)
    assert _on_disk(saved) == [15, 20]
    may_end = threading.Event()
    monkeypatch.setattr(pruner, "prune", lambda: may_end.wait(30))
    pruner.finish(lambda: True)  # asked to go, it does not wait for a slow disk
    may_end.set()


def test_a_run_that_ended_is_pruned_by_who_wrote_its_end(saved: Claimed) -> None:
    url = saved.sessions.kw["bind"].url.render_as_string(hide_password=False)
    supervisor = Supervisor(WorkerSettings(DATABASE_URL=url, data_dir=saved.data), saved.run_id, saved.token)
    with saved.sessions.begin() as session:
        transition(session, saved.run_id, "running")
    segment = saved.segment()
    delivery = Delivery(saved.sessions, saved.run_id, 1, segment)
    pruner = Pruner(saved.sessions, saved.run_id, saved.token, saved.run_dir, rules_of(SPEC))
    gone = cast(TrainerProcesses, None)  # its trainer has left
    attempt = Attempt(1, segment, AttemptView(segment), delivery, pruner, gone)
    assert supervisor._rest(attempt, Outcome("succeeded", "goal")) == 0
    supervisor.engine.dispose()
    assert (saved.run().state, _on_disk(saved)) == ("succeeded", [15, 20])


def test_a_row_that_leads_elsewhere_removes_nothing_there(
    saved: Claimed, prune: Callable[[], list[int]], tmp_path: Path
) -> None:
    """P33: neither a path with dots nor a link is followed when files are deleted."""
    for name in ("dots", "link"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").write_text("x")
    _change(saved, 5, status="removed", path=f"../../{tmp_path.name}/dots")
    saved.segment().checkpoint(10).rename(tmp_path / "moved")
    saved.segment().checkpoint(10).symlink_to(tmp_path / "link")
    prune()
    assert [(tmp_path / name / "precious").read_text() for name in ("dots", "link")] == ["x", "x"]
    assert _on_disk(saved) == [5, 10, 15, 20]


def test_half_written_ones_of_abandoned_segments_are_cleared(saved: Claimed, prune: Callable[[], list[int]]) -> None:
    left = saved.segment().checkpoints / ".iter-000025.77.tmp"
    left.mkdir()
    prune()
    assert left.exists(), "the trainer of the newest segment may be writing it"
    segment = saved.run_dir / "segment-0002"
    shutil.copytree(saved.segment().path, segment, ignore=lambda *_: ["checkpoints"])
    Pruner(saved.sessions, saved.run_id, saved.token, saved.run_dir, rules_of(SPEC)).prune()
    assert not left.exists()


@pytest.mark.parametrize("what", ["pin", "segment", "roll back"])
def test_what_is_asked_for_between_looking_and_removing_stays(
    saved: Claimed, monkeypatch: pytest.MonkeyPatch, prune: Callable[[], list[int]], what: str
) -> None:
    """P17: the decision is made again under the run's lock; a moment before, somebody needed the checkpoint."""
    remove = retention.remove

    def asked_first(session: object, run_id: str, checkpoint: str, *rest: object) -> bool:
        with saved.sessions.begin() as other:
            ten = other.scalars(select(Checkpoint).where(Checkpoint.iteration == 10)).one()
            if what == "pin":
                ten.pinned = True
            elif what == "segment" and other.get(Segment, (run_id, 2)) is None:
                other.add(Segment(run_id=run_id, number=2, kind="rollback", spec={}, start_checkpoint=ten.id))
            elif what == "roll back" and other.get(Command, "c-1") is None:
                payload = {"checkpoint": ten.id}
                other.add(Command(id="c-1", run_id=run_id, kind="rollback", payload=payload, deadline_at=func.now()))
        return remove(session, run_id, checkpoint, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(retention, "remove", asked_first)
    assert prune() == [5]


# What the preview says is what happens.

records = st.fixed_dictionaries(
    {
        "segment": st.integers(1, 2),
        "status": st.sampled_from(["good", "good", "good", "damaged"]),
        "verified": st.booleans(),
        "pinned": st.sampled_from([False, False, False, True]),
        "judge_score": st.none() | st.floats(0, 1),
    }
)


@given(
    histories=st.lists(st.tuples(st.integers(1, 60), records), max_size=9, unique_by=lambda pair: pair[0]),
    rules=st.builds(
        CheckpointsConfig,
        keep_last=st.integers(1, 3) | st.just(-1),
        keep_every=st.none() | st.integers(2, 20),
        keep_best=st.integers(0, 2),
    ),
    gates=st.lists(st.integers(1, 60), max_size=3),
    start=st.none() | st.integers(0, 8),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_pruner_removes_exactly_what_the_preview_said(
    claimed: Claimed, histories: list, rules: CheckpointsConfig, gates: list[int], start: int | None
) -> None:
    with claimed.sessions.begin() as session:
        session.execute(delete(Checkpoint))
        session.execute(delete(MetricPoint))
        session.execute(delete(Segment).where(Segment.number > 1))
        session.execute(update(Segment).values(spec={"checkpoints": rules.model_dump()}))
        shutil.rmtree(claimed.run_dir, ignore_errors=True)
        session.add(Segment(run_id=claimed.run_id, number=2, kind="recovery", spec={}, start_iteration=30))
        session.flush()
        for iteration, record in histories:
            said = claimed.save(iteration, record["segment"])
            said["judge_score"] = record["judge_score"]
            path = f"segment-{record['segment']:04d}/{said.pop('path')}"
            new = NewCheckpoint(segment=record["segment"], iteration=iteration, path=path, **said)
            row = record_checkpoint(session, claimed.run_id, new, claimed.token)
            assert row is not None
            row.status, row.pinned = record["status"], record["pinned"]
            row.verified_at = datetime.now(UTC) if record["verified"] and row.status == "good" else None
            if start is not None and histories.index((iteration, record)) == start:
                session.get_one(Segment, (claimed.run_id, 2)).start_checkpoint = row.id
        held = [IterationMetrics(gate, datetime.now(UTC), {"judge/win_rate": 0.5}) for gate in sorted(set(gates))]
        write_metrics(session, claimed.run_id, 1, held, active=True)
    with claimed.sessions() as session:
        preview = preview_gc(claimed.run_id, session)
    said = {item.checkpoint for item in preview.items if not item.stays}
    gone = Pruner(claimed.sessions, claimed.run_id, claimed.token, claimed.run_dir, rules).prune()
    assert set(gone) == said
    with claimed.sessions() as session:
        rows = session.scalars(select(Checkpoint)).all()
        again = preview_gc(claimed.run_id, session)
    assert {row.id for row in rows if not (claimed.run_dir / row.path).exists()} == said
    assert preview.freed_bytes == sum(row.bytes for row in rows if row.id in said)
    assert all(item.stays for item in again.items)


def test_unreadable_rules_keep_everything() -> None:
    assert rules_of({"checkpoints": {"keep_last": "many"}}).keep_last == -1
