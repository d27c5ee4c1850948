"""What must start in a second never loads the training stack: each door is opened in a fresh interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

DOORS = (
    "ppo_core.spec", "ppo_core.registry", "ppo_core.estimate", "ppo_core.retention", "ppo_core.rundir",
    "api.main", "worker.app", "worker.loop", "worker.supervise", "worker.reconcile", "store.migrate",
    "ppo", "ppo.client", "ppo.cli", "ppo.train", "ppo.local.stack",
)  # fmt: skip
HEAVY = ("torch", "transformers", "deepspeed", "vllm")
LIGHT = ("ppo", "ppo.client", "ppo.cli", "ppo.train")  # what a laptop that only talks to a platform starts


def modules_after_importing(door: str, tmp_path: Path) -> set[str]:
    env = {
        **os.environ,
        "DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none",  # settings want an address; none is connected to
        "PPO_DATA_DIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", f"import {door}, sys; print(*sys.modules)"],
        env=env, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("door", DOORS)
def test_a_door_opens_without_the_training_stack(door: str, tmp_path: Path) -> None:
    assert not modules_after_importing(door, tmp_path) & set(HEAVY)


@pytest.mark.parametrize("door", LIGHT)
def test_the_command_line_loads_neither_api_nor_worker_nor_store(door: str, tmp_path: Path) -> None:
    loaded = {name.split(".")[0] for name in modules_after_importing(door, tmp_path)}
    assert not loaded & {"api", "worker", "store", "sqlalchemy", "celery"}
