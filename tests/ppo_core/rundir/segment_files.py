"""A segment's files as these tests make them, and programs that do so in a process of their own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

from ppo_core.rundir import (
    SegmentDir,
    SegmentStart,
    new_checkpoint,
)

START = SegmentStart("r-1", 1, {"name": "t", "kl": {"coef": 0.1}})
CONTENTS = {
    "state.json": b'{"iteration": 5}\n',
    "policy/config.json": b"{}",
    "policy/model.safetensors": bytes(range(40)),
}


def make_checkpoint(segment: SegmentDir, iteration: int) -> Path:
    target = segment.checkpoint(iteration)
    with new_checkpoint(target) as folder:
        for name, content in CONTENTS.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
    return target


def run_script(text: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
