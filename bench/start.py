"""How long `ppo up` takes to a page that answers: on an empty data folder, and again on the same data."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import httpx

from ppo.local.stack import Stack

LIMIT_S = 30.0  # what the README promises for a second start
STARTS = 3


def seconds_to_a_page(data: Path) -> float:
    began = time.monotonic()
    with Stack(data, port=0) as stack:
        httpx.get(stack.url, follow_redirects=True, trust_env=False).raise_for_status()
        return time.monotonic() - began


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="ppo-bench-") as folder:
        first = seconds_to_a_page(Path(folder) / "data")
        again = sorted(seconds_to_a_page(Path(folder) / "data") for _ in range(STARTS))
    print(f"first start             {first:6.1f} s")
    print(
        f"again, slowest of {STARTS}     {again[-1]:6.1f} s   {again[-1] / LIMIT_S:.2f} of the limit of {LIMIT_S:.0f} s"
    )
