"""What `ppo up` says once it runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ppo.access import DEFAULT_FOLDER
from ppo.cli import banner


def test_a_folder_of_ones_own_comes_with_the_line_that_other_commands_need(tmp_path: Path) -> None:
    data = tmp_path / "my data"
    line = next(text for text in banner("http://u", "http://u/login#token=t", data) if "PPO_HOME" in text)
    command = line[line.index("export") :]
    shell = subprocess.run(
        ["sh", "-c", f'{command}; printf %s "$PPO_HOME"'], capture_output=True, text=True, check=True
    )
    assert shell.stdout == str(data)


def test_the_default_folder_needs_no_such_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "PPO_HOME" not in " ".join(banner("http://u", "http://u/login#token=t", Path(DEFAULT_FOLDER).resolve()))
