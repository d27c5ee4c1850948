"""A disk that is full: the run pauses on its last good checkpoint and says why; resumed, it goes on from there."""

from __future__ import annotations

import errno
import json
import math
import sys
from collections import namedtuple
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from ppo_core.main import run_segment
from ppo_core.rundir import (
    ControlCommand,
    Event,
    EventType,
    ExitCode,
    JournalWriter,
    SegmentDir,
    checkpoints,
    create_segment,
    next_start,
    read_manifest,
    reserved_space,
    send_command,
    verify_checkpoint,
)
from tests.ppo_core.toy_run import journal, make_toy, timeless, toy_segment

NO_SPACE = OSError(errno.ENOSPC, "No space left on device")
# What writes tensors repeats the system's number in a text of its own.
NO_SPACE_FOR_TENSORS = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
WRITERS = {
    "tensors": ("ppo_core.checkpoints.save_file", NO_SPACE_FOR_TENSORS),
    "policy": ("ppo_core.checkpoints.save_policy", NO_SPACE),
    "manifest": ("ppo_core.rundir.checkpoint_files.write_manifest", OSError(errno.EDQUOT, "Disk quota exceeded")),
    "samples": ("ppo_core.trainer.write_atomically", NO_SPACE),
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    toy = make_toy(tmp_path_factory.mktemp("toy"))
    return {**toy, "iterations": 3, "checkpoints": {"every": 1}, "evaluation": {"every": 3, "prompts": 2}}


@pytest.fixture(scope="module")
def straight(toy: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> SegmentDir:
    segment = toy_segment(tmp_path_factory.mktemp("run"), toy)
    assert run_segment(segment, token=0, attempt=1) == ExitCode.DONE
    return segment


def full_from(place: str, error: BaseException, iteration: int, patch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """A change of the trainer: from this iteration on nothing can be written by what `place` names."""

    def change(trainer: Any) -> None:
        one_iteration = trainer._one_iteration

        def fails(*_: Any, **__: Any) -> Any:
            raise error

        def then() -> Any:
            if trainer.state.iteration + 1 == iteration:
                patch.setattr(place, fails)
            return one_iteration()

        trainer._one_iteration = then

    return change


def metrics_of(segment: SegmentDir) -> dict[int, dict[str, Any]]:
    return {event.iteration: timeless(event.payload) for event in journal(segment, "metrics")}


def weights_of(segment: SegmentDir) -> dict[str, str]:
    files = read_manifest(checkpoints(segment)[-1])
    return {name: entry["sha256"] for name, entry in files.items() if name.endswith(".safetensors")}


@pytest.mark.parametrize("writer", WRITERS)
def test_the_run_pauses_and_resumed_goes_on_exactly_from_its_last_good_checkpoint(
    toy: dict[str, Any], straight: SegmentDir, tmp_path: Path, writer: str
) -> None:
    """T29: mlfoundations/open_lm#154."""
    segment = toy_segment(tmp_path, toy)
    with pytest.MonkeyPatch.context() as patch:
        change = full_from(*WRITERS[writer], 2, patch)
        assert run_segment(segment, token=0, attempt=1, change=change) == ExitCode.PAUSED
    end = journal(segment, "end")[0].payload
    assert (end["code"], end["reason"], end["error"]["code"]) == (10, "disk_full", "disk_full")
    assert "resume the run" in end["error"]["hint"]
    assert [path.name for path in segment.checkpoints.iterdir()] == ["iter-000001"]
    verify_checkpoint(segment.checkpoint(1))
    if writer != "samples":
        assert f"no space left to write {segment.checkpoint(2)}, " in end["error"]["message"]
        assert " MiB are free" in end["error"]["message"]

    start = next_start(segment.path.parent)
    assert (start.segment, start.checkpoint) == (2, str(segment.checkpoint(1)))
    again = create_segment(segment.path.parent, start)
    assert run_segment(again, token=0, attempt=2) == ExitCode.DONE
    assert metrics_of(again) == {number: metrics_of(straight)[number] for number in (2, 3)}
    assert weights_of(again) == weights_of(straight)


def test_a_disk_without_room_for_a_line_still_takes_the_last_word(
    toy: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P18, the log's folder too: nothing can be written or printed any more, but for what the reserve gave up."""
    segment = toy_segment(tmp_path, toy)
    append, printed = JournalWriter.append, print

    def full() -> bool:
        return segment.reserve.exists() and segment.checkpoint(1).exists()

    def appending(self: JournalWriter, type: EventType, iteration: int, payload: Mapping[str, Any]) -> Event:
        if full():
            raise NO_SPACE
        return append(self, type, iteration, payload)

    def printing(*words: Any, **more: Any) -> None:
        if more.get("file") is sys.stderr:
            raise NO_SPACE
        printed(*words, **more)

    monkeypatch.setattr(JournalWriter, "append", appending)
    monkeypatch.setattr("builtins.print", printing)
    assert run_segment(segment, token=0, attempt=1) == ExitCode.PAUSED
    assert journal(segment, "end")[0].payload["reason"] == "disk_full"
    assert not segment.reserve.exists()


def test_the_reserve_is_as_large_as_it_says_and_gone_at_the_end(tmp_path: Path) -> None:
    with reserved_space(tmp_path / "reserve"):
        assert (tmp_path / "reserve").stat().st_blocks * 512 >= 64 * 1024
    assert list(tmp_path.iterdir()) == []


def test_the_last_checkpoint_of_a_stop_that_finds_no_space_is_told_too(
    toy: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the stop wanted to save is lost, and the run says so instead of saying that it was saved."""
    segment = toy_segment(tmp_path, {**toy, "checkpoints": {"every": 100}})

    def change(trainer: Any) -> None:
        generate = trainer.models.engine.generate

        def asking(*args: Any, **kwargs: Any) -> Any:
            if trainer.control.iteration == 2:
                send_command(segment, ControlCommand("c-1", "stop", 0))
                trainer.control._looked_at = -math.inf
                monkeypatch.setattr("ppo_core.checkpoints.save_policy", lambda *_: (_ for _ in ()).throw(NO_SPACE))
            return generate(*args, **kwargs)

        trainer.models.engine.generate = asking

    assert run_segment(segment, token=0, attempt=1, change=change) == ExitCode.PAUSED
    assert journal(segment, "end")[0].payload["reason"] == "disk_full"
    assert [event.payload["status"] for event in journal(segment, "ack")] == ["accepted"]
    assert list(segment.checkpoints.iterdir()) == []


def test_little_space_is_told_before_the_save_and_no_fault(
    toy: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second save finds less room than the first one took: it is tried, and told of."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("ppo_core.trainer.shutil.disk_usage", lambda path: usage(1, 1, 1000))
    segment = toy_segment(tmp_path, {**toy, "iterations": 2})
    assert run_segment(segment, token=0, attempt=1) == ExitCode.DONE
    (note,) = journal(segment, "note")
    assert note.iteration == 2
    assert "0 MiB are free" in note.payload["message"]
    size = json.loads((segment.checkpoint(1) / "manifest.json").read_text())["files"]
    took = sum(entry["bytes"] for entry in size.values()) / 2**20
    assert f"the last checkpoint took {took:.0f} MiB" in note.payload["message"]
