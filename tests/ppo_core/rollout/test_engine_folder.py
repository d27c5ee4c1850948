"""What a killed trainer leaves behind goes with a later start, and nothing else does."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ppo_core.rollout.engine_folder import PREFIX, EngineFolder, remove_left_behind

OWNER = """
import sys, time
from ppo_core.rollout.engine_folder import EngineFolder
folder = EngineFolder()
(folder.path / "config.json").write_text("{}")
print(folder.path, flush=True)
time.sleep(600)
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def make_old(folder: Path) -> None:
    os.utime(folder, (1, 1))


def test_it_is_gone_once_it_is_removed_or_forgotten(root: Path) -> None:
    one = EngineFolder()
    (one.path / "file").write_text("x")
    assert list(root.iterdir()) == [one.path]
    one.remove()
    one.remove()
    other = EngineFolder()
    assert list(root.iterdir()) == [other.path]
    del other
    assert list(root.iterdir()) == []


def test_a_killed_trainers_folder_goes_with_the_next_start_and_a_living_ones_stays(root: Path) -> None:
    owners = [subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        folders = [Path(owner.stdout.readline().strip()) for owner in owners if owner.stdout is not None]
        assert [folder.parent for folder in folders] == [root, root]
        for folder in folders:
            make_old(folder)
        owners[0].kill()
        owners[0].wait()
        started = EngineFolder()
        assert set(root.iterdir()) == {folders[1], started.path}
        assert (folders[1] / "config.json").exists()
    finally:
        for owner in owners:
            owner.kill()
            owner.communicate()


def test_what_is_young_a_link_or_not_an_engines_stays(root: Path) -> None:
    (root / f"{PREFIX}young").mkdir()
    elsewhere = root / "elsewhere"
    elsewhere.mkdir()
    (root / f"{PREFIX}link").symlink_to(elsewhere)
    (root / f"{PREFIX}file").write_text("x")
    make_old(elsewhere)
    make_old(root / f"{PREFIX}file")
    before = set(root.iterdir())
    remove_left_behind(root)
    assert set(root.iterdir()) == before
    remove_left_behind(root, young_s=-1)
    assert before - set(root.iterdir()) == {root / f"{PREFIX}young"}
