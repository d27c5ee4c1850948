"""A segment of a run that has only begun."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo_core.rundir import SegmentDir, create_segment
from tests.ppo_core.rundir.segment_files import START


@pytest.fixture
def segment(tmp_path: Path) -> SegmentDir:
    return create_segment(tmp_path / "run", START)
