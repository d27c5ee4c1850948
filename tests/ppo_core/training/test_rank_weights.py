"""Weights in parts are made whole by all ranks or by none: one that cannot is named at once, and nobody waits."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from tests.ppo_core.rank_processes import run_all
from tests.ppo_core.toy_run import journal, make_toy, toy_segment

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

# Far longer than the test: whoever waits for another rank until then fails it.
PEER_TIMEOUT_S = 3600.0
FAULTS = {"no-room": "_require_room failed on rank 1", "no-whole": "merged_weight failed on rank 0"}


def test_a_rank_that_cannot_make_weights_whole_in_a_sync_fails_all_at_once(tmp_path: Path) -> None:
    training = {"engine": "deepspeed", "ranks": 2, "zero_stage": 3, "peer_timeout_s": PEER_TIMEOUT_S}
    spec = {**make_toy(tmp_path), "iterations": 2, "training": training}
    segments = {name: toy_segment(tmp_path / name, spec) for name in FAULTS}
    run_all(list(segments.values()), 2, tmp_path / "log", seconds=300)
    for name, message in FAULTS.items():
        (end,) = journal(segments[name], "end")
        assert end.payload["reason"] == "error"
        assert message in end.payload["error"]["message"]
        # After the iteration's update, so in its sync, and before the next rollout.
        (sync,) = [event for event in journal(segments[name], "phase") if event.payload["phase"] == "sync"]
        waited = datetime.fromisoformat(end.time) - datetime.fromisoformat(sync.time)
        assert waited.total_seconds() < 20
