"""`ppo train` keeps what its rules say, and never trusts a checkpoint that it has not compared with its manifest."""

from __future__ import annotations

from pathlib import Path

from ppo.pruning import Pruner
from ppo_core.rundir import (
    JournalWriter,
    SegmentDir,
    SegmentStart,
    checkpoints,
    create_segment,
    new_checkpoint,
    segment_dir,
)
from ppo_core.spec.groups import CheckpointsConfig


def made_run(run_dir: Path, iterations: list[int]) -> list[Path]:
    segment = create_segment(run_dir, SegmentStart("toy", 1, {}))
    JournalWriter(segment.journal).close()
    for iteration in iterations:
        with new_checkpoint(segment.checkpoint(iteration)) as folder:
            (folder / "weights").write_bytes(bytes([iteration % 256]) * 100)
    return checkpoints(segment)


def names(run_dir: Path) -> list[str]:
    return [path.name for path in sorted((run_dir / "segment-0001" / "checkpoints").iterdir())]


def test_the_newest_stay_and_older_ones_go(tmp_path: Path) -> None:
    made_run(tmp_path, [9, 10, 100])
    assert Pruner(tmp_path, CheckpointsConfig(keep_last=2, keep_best=0)).prune() == []
    assert names(tmp_path) == ["iter-000010", "iter-000100"]


def test_a_damaged_newest_one_is_told_and_the_last_good_one_stays(tmp_path: Path) -> None:
    made = made_run(tmp_path, [10, 20, 30])
    (made[-1] / "weights").write_bytes(b"something else" * 10)
    pruner = Pruner(tmp_path, CheckpointsConfig(keep_last=1, keep_best=0))
    told = pruner.prune()
    assert len(told) == 1
    assert "iter-000030/weights" in told[0]
    assert "iter-000020" in names(tmp_path)
    assert pruner.prune() == []  # told once


def test_the_last_two_gates_keep_theirs_across_a_recovery(tmp_path: Path) -> None:
    """Gates at 15, 25 and 35; the run was lost at 45 and went on from 40 in a segment of its own."""
    pruner = Pruner(tmp_path, CheckpointsConfig(keep_last=1, keep_best=0))

    def save(segment: SegmentDir, iteration: int, gate: int | None = None) -> None:
        with new_checkpoint(segment.checkpoint(iteration)) as folder:
            (folder / "weights").write_bytes(b"w")
        assert pruner.prune() == []
        if gate is not None:
            journal = JournalWriter(segment.journal)
            journal.append("metrics", gate, {"judge/win_rate": None})
            journal.close()

    made_run(tmp_path, [])
    first = segment_dir(tmp_path, 1)
    for iteration in (10, 20, 30, 40):
        save(first, iteration, gate=iteration + 5)
    second = create_segment(tmp_path, SegmentStart("toy", 2, {}, str(first.checkpoint(40))))
    JournalWriter(second.journal).close()
    for iteration in (50, 60):
        save(second, iteration)
    # 40 is where segment 2 starts; the gate of 45 is of what was left behind.
    assert names(tmp_path) == ["iter-000020", "iter-000030", "iter-000040"]
    assert [path.name for path in checkpoints(second)] == ["iter-000060"]


def test_the_end_that_undoes_a_roll_back_stays(tmp_path: Path) -> None:
    made = made_run(tmp_path, [10, 20, 30, 40])
    second = create_segment(tmp_path, SegmentStart("toy", 2, {}, str(made[1])))
    JournalWriter(second.journal).close()
    for iteration in (30, 40):
        with new_checkpoint(second.checkpoint(iteration)) as folder:
            (folder / "weights").write_bytes(b"w")
    assert Pruner(tmp_path, CheckpointsConfig(keep_last=1, keep_best=0)).prune() == []
    assert names(tmp_path) == ["iter-000020", "iter-000040"]


def test_the_newest_from_before_an_open_alert_stays_until_it_is_cleared(tmp_path: Path) -> None:
    made_run(tmp_path, [10, 20, 30, 40])
    journal = JournalWriter(segment_dir(tmp_path, 1).journal)
    journal.append("alert", 35, {"id": "al-1", "status": "raised", "onset": 21})
    pruner = Pruner(tmp_path, CheckpointsConfig(keep_last=1, keep_best=0))
    assert pruner.prune() == []
    # The one of 20, and 10 for as long as nobody has looked whether that is whole.
    assert names(tmp_path) == ["iter-000010", "iter-000020", "iter-000040"]
    journal.append("alert", 40, {"id": "al-1", "status": "cleared", "onset": 21})
    journal.close()
    assert pruner.prune() == []
    assert names(tmp_path) == ["iter-000040"]
