"""The arrows between the parts, as pyproject.toml states them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_import_contract_is_kept() -> None:
    command = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_core_package_itself_imports_nothing() -> None:
    """`ppo_core/__init__.py` runs before every door."""
    assert (ROOT / "ppo_core" / "__init__.py").read_text(encoding="utf-8") == ""
