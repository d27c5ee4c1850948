"""What the api, the worker and the command line import of `ppo_core` brings no training stack along."""

from __future__ import annotations

import subprocess
import sys

import pytest

DOORS = ["registry", "registry.page", "estimate", "retention", "limit", "spec", "spec.page", "rundir"]


@pytest.mark.parametrize("door", DOORS)
def test_a_door_opens_without_torch(door: str) -> None:
    code = (
        f"import sys, ppo_core.{door}\n"
        "heavy = {'torch', 'transformers', 'numpy', 'deepspeed', 'vllm', 'fastapi', 'sqlalchemy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
