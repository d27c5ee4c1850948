"""A trainer command for runs with a fault in them, the one that the run's name says: SEGMENT_DIR --token N --attempt M.

Runs of other names are the real trainer's, untouched.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from ppo_core.main import run_segment
from ppo_core.rundir import SegmentDir
from tests.ppo_core.diagnostics.planted import FAULTS, plant

PREFIX = "planted-"


def main() -> None:
    """Leaves by `os._exit`, as the trainer does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("segment", type=Path)
    parser.add_argument("--token", type=int, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    asked = parser.parse_args()
    segment = SegmentDir(asked.segment)
    name = segment.read_start().spec["name"]
    if not name.startswith(PREFIX):
        os.execv(sys.executable, [sys.executable, "-m", "ppo_core.main", *sys.argv[1:]])
    code = run_segment(segment, asked.token, asked.attempt, change=plant(FAULTS[name.removeprefix(PREFIX)]))
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
