"""One rank of a run, as a program: `measured_rank.py SEGMENT RESULT` writes the most bytes of tensors of each phase."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from ppo_core.rundir import SegmentDir
from tests.ppo_core.tensor_memory import peaks_of_run

if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        peaks = peaks_of_run(SegmentDir(Path(sys.argv[1])), patch)
    Path(f"{sys.argv[2]}-{os.environ['RANK']}.json").write_text(json.dumps(peaks), encoding="utf-8")
    os._exit(0)
