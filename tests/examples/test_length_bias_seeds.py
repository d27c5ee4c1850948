"""The length-bias example's story with its real models: three seeds, its twin, and the controlled reward model.

Ten minutes each on two cores, and the preparation before the first.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(("tale", "seed"), [("story", 1), ("story", 2), ("story", 3), ("twin", 1), ("controlled", 1)])
def test_the_promises_of_the_example_are_kept(tmp_path: Path, tale: str, seed: int) -> None:
    folders = ["--data", str(tmp_path / "data"), "--out", str(tmp_path / "told")]
    words = [sys.executable, "-m", "examples.length_bias", tale, "--seed", str(seed), "--port", "0", *folders]
    told = subprocess.run(words, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr
    assert (tmp_path / f"told/{tale}-{seed}.json").exists()
