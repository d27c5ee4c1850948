"""The real trainer, killed -9 while it saves: it goes on from a whole checkpoint, and its numbers are the same."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ppo_core.rundir import (
    SegmentDir,
    checkpoint_iteration,
    checkpoints,
    create_segment,
    journalled_digest,
    next_start,
    read_manifest,
    segments,
    verify_checkpoint,
)
from tests.ppo_core.toy_run import journal, make_toy, timeless, toy_segment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def start(segment: SegmentDir) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "ppo_core.main", str(segment.path)]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def metrics_of(run_dir: Path) -> dict[int, dict[str, Any]]:
    """By iteration; of one that was done again, the last time."""
    return {event.iteration: timeless(event.payload) for one in segments(run_dir) for event in journal(one, "metrics")}


def weights_of(segment: SegmentDir) -> dict[str, str]:
    files = read_manifest(checkpoints(segment)[-1])
    return {name: entry["sha256"] for name, entry in files.items() if name.endswith(".safetensors")}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    toy = make_toy(tmp_path_factory.mktemp("toy"))
    return {**toy, "iterations": 4, "checkpoints": {"every": 1}, "data": {**toy["data"], "held_out": None}}


@pytest.fixture(scope="module")
def straight(toy: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> SegmentDir:
    segment = toy_segment(tmp_path_factory.mktemp("run"), toy)
    assert start(segment).wait(300) == 0
    return segment


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_kill_in_a_save_costs_only_that_save(
    toy: dict[str, Any], straight: SegmentDir, tmp_path: Path, seed: int
) -> None:
    """T24: vllm-project/speculators#739. What is half-written is never trusted, and never in the way."""
    dice = random.Random(seed)
    segment = toy_segment(tmp_path, toy)
    process = start(segment)
    deadline = time.monotonic() + 300
    saving = dice.choice([2, 3])
    while not list(segment.checkpoints.glob(f".iter-{saving:06d}.*.tmp")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.0005)
    time.sleep(dice.random() * 0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    offered = checkpoints(segment)
    for path in offered:
        verify_checkpoint(path, journalled_digest(path))
    assert checkpoint_iteration(offered[-1]) in (saving - 1, saving)
    again = create_segment(tmp_path, next_start(tmp_path))
    assert start(again).wait(300) == 0
    assert not list(tmp_path.glob("segment-*/checkpoints/.*"))
    assert metrics_of(tmp_path) == metrics_of(straight.path.parent)
    assert weights_of(again) == weights_of(straight)
