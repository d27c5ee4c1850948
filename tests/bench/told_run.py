"""In the place of `bench.gpu.measured`: says that a run was as a file has it, hangs, or leaves without a word.

python -m tests.bench.told_run SEGMENT TARGET
"""

from __future__ import annotations

import os
import shutil
import sys
import time

TOLD = "PPO_TEST_TOLD_RUN"  #: the file, or "hang", or "die"

if __name__ == "__main__":
    match os.environ[TOLD]:
        case "hang":
            time.sleep(600)
        case "die":
            sys.exit("out of something")
        case path:
            shutil.copy(path, sys.argv[2])
