"""A trainer command for platforms that hold both kinds of runs: specs with `scripted` go to the scripted trainer.

Arguments are those of every trainer command: SEGMENT_DIR --token N --attempt M.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ppo_core.rundir import SegmentDir

SCRIPTED = Path(__file__).parents[1] / "worker" / "scripted_trainer.py"

if __name__ == "__main__":
    spec = SegmentDir(Path(sys.argv[1])).read_start().spec
    program = [str(SCRIPTED)] if "scripted" in spec else ["-m", "ppo_core.main"]
    os.execv(sys.executable, [sys.executable, *program, *sys.argv[1:]])
