"""With the leases of a real platform: a lost machine's run goes on elsewhere within 60 s, as if nothing had been."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from store.states import TERMINAL
from tests.faults.checker import Expected, violations, watch
from tests.ppo_core.rank_processes import PROGRAM, exit_codes, start_ranks
from tests.ppo_core.toy_run import toy_segment
from tests.worker.exact_runs import (
    HALF,
    last_state,
    lose_machine_in_update,
    metrics_of,
    samples_of,
    stateful_spec,
)
from tests.worker.platform import Platform

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(900)]

GOES_ON_WITHIN_S = 60
# The worker's own defaults.
SETTINGS = {
    "PPO_TRAINER_COMMAND": "",
    "OMP_NUM_THREADS": "1",
    "PPO_LEASE_S": "20",
    "PPO_RENEW_S": "5",
    "PPO_POLL_S": "5",
}


def test_a_lost_machines_run_goes_on_elsewhere_bit_for_bit(database_url: str, tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    spec = stateful_spec(tmp_path / "toy")
    straight = toy_segment(tmp_path / "straight", spec)
    assert exit_codes(start_ranks(1, str(PROGRAM), str(straight.path), log=tmp_path / "alone"), 240) == [0]
    with Platform(database_url, tmp_path, dict(SETTINGS)) as platform:
        platform.start("worker.loop")
        run_id = platform.submit_spec(spec)
        lose_machine_in_update(platform, run_id, HALF + 1)
        lost = time.monotonic()
        platform.start("worker.loop", PPO_WORKER_ID="there")
        platform.start("worker.reconcile")
        platform.wait(run_id, lambda run: run.attempt == 2 and run.state == "running", timeout_s=GOES_ON_WITHIN_S)
        assert time.monotonic() - lost <= GOES_ON_WITHIN_S
        assert platform.run(run_id).lease_worker == "there"
        platform.wait_state(run_id, *TERMINAL, timeout_s=240)
        seen = watch(platform, {run_id: time.monotonic() + 5})[run_id]
        assert violations(platform, seen, Expected(attempts=(2,), failures=(1,))) == []
    run_dir = tmp_path / "runs" / run_id
    assert metrics_of(run_dir) == metrics_of(straight.path.parent)
    assert samples_of(run_dir) == samples_of(straight.path.parent)
    assert last_state(run_dir) == last_state(straight.path.parent)
