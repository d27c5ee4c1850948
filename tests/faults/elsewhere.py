"""A worker and a reconciler that cannot see, and so cannot end, the processes of this machine.

They are in a PID namespace of their own, as on another machine that shares the data folder. Where the kernel does not
allow one (it takes root), they are started beside the others: then the frozen are ended, and never come back.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.faults.stage import SLOTS, Stage

APART = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def can_be_apart() -> bool:
    """Whether a process may have numbers and a /proc of its own here."""
    return subprocess.run([*APART, "true"], capture_output=True, check=False).returncode == 0


@contextmanager
def elsewhere(stage: Stage) -> Iterator[None]:
    """Worker "there" and a reconciler, apart from everything else, ended with their runs' processes."""
    apart = APART if can_be_apart() else ()
    settings = {"PPO_WORKER_ID": "there", "PPO_CPU_SLOTS": str(SLOTS)}
    processes = []
    for module in ("worker.loop", "worker.reconcile"):
        with (stage.platform.data / f"{module}-there.log").open("ab") as output:
            words = [*apart, sys.executable, "-m", module]
            environment = stage.platform.environment(**settings)
            processes.append(subprocess.Popen(words, env=environment, stdout=output, stderr=output))
    stage.platform.processes += processes
    yield
    for process in processes:
        stage.kill(process)
