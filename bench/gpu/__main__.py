"""`python -m bench.gpu`: train twice on one GPU that vLLM shares, check every promise, print and write the figures.

    python -m bench.gpu [--small] [--out FOLDER]

It leaves `gpu.md` and `gpu.json` in the folder, and ends with 1 if a promise is not kept. In about twelve minutes on
one H200, in two or three with `--small`; 10 GB of disk are used on the way.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import packages_distributions, version
from pathlib import Path

import torch

from bench.gpu.case import DEFAULT, SMALL, Case, remove_case, spec_of, write_case
from bench.gpu.observations import GIB, Observations
from bench.gpu.promises import LIMIT_S, Promise, in_time, promises_of
from bench.gpu.tables import as_json, as_markdown
from ppo_core.checkpoints import versions
from ppo_core.rundir import SegmentStart, create_segment
from ppo_core.rundir.ranks import device_names, free_port, rank_environment

ENGINES = ("local", "deepspeed")
LOG_LINES = 15


def refusal() -> str | None:
    """Why it cannot be run here, and what to do, in a line."""
    for package in ("vllm", "deepspeed"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed here: install the version that requirements/engines.txt names"
    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} sees no CUDA device: run this on a machine with a GPU, its driver, and CUDA "
            "builds of torch and vLLM"
        )
    return None


def about_here() -> dict[str, str]:
    """The device, and every version that numbers may depend on."""
    device = torch.cuda.get_device_properties(0)
    return {
        "device": f"{device.name}, {device.total_memory / GIB:.0f} GiB",
        "CUDA": str(torch.version.cuda),
        # A build of vLLM may be distributed under another name than its module's.
        **{module: version(packages_distributions()[module][0]) for module in ("vllm", "deepspeed")},
        **versions(),
    }


def run_apart(engine: str, case: Case, folder: Path, module: str, until: float) -> Observations:
    """Observations of one run, made by `module` in a process of its own that has until then (monotonic seconds)."""
    segment = create_segment(folder / engine, SegmentStart(f"gpu-{engine}", 1, spec_of(case, folder, engine)))
    target, log = folder / f"{engine}.json", folder / f"{engine}.log"
    devices = device_names([0], os.environ.get("CUDA_VISIBLE_DEVICES"))
    environment = {**os.environ, **rank_environment(0, 1, free_port(), devices)}
    command = [sys.executable, "-m", module, str(segment.path), str(target)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code: int | None = process.wait(max(1.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # vLLM dies with it by itself.
                process.wait()
    if target.exists():
        return Observations.read(target)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
    print("\n".join(lines), file=sys.stderr)
    ended = "did not end in time" if code is None else f"ended with code {code} and left no word"
    return Observations(engine, case.iterations, None, f"it {ended}; its last line: {lines[-1] if lines else 'none'}")


def run(
    case: Case, out: Path, about: dict[str, str], module: str = "bench.gpu.measured", engines: Sequence[str] = ENGINES
) -> int:
    """Measure every engine one after the other, write both files; returns the exit code."""
    began = time.monotonic()
    runs: list[Observations] = []
    promises: list[Promise] = []
    folder = Path(tempfile.mkdtemp(prefix="ppo-bench-gpu-"))
    try:
        write_case(case, folder)
        for engine in engines:
            print(f"training with {engine} ...", flush=True)
            runs.append(run_apart(engine, case, folder, module, began + LIMIT_S))
            remove_case(folder / engine)
    finally:
        remove_case(folder)
    promises = [promise for one in runs for promise in promises_of(one)] + [in_time(time.monotonic() - began)]
    out.mkdir(parents=True, exist_ok=True)
    text = as_markdown(runs, promises, about)
    (out / "gpu.md").write_text(text, encoding="utf-8")
    (out / "gpu.json").write_text(json.dumps(as_json(runs, promises, about), indent=1) + "\n", encoding="utf-8")
    print(text)
    broken = [promise for promise in promises if not promise.is_kept]
    for promise in broken:
        print(f"NOT KEPT, {promise.of}: {promise.text}: {promise.found}, wanted {promise.wanted}", file=sys.stderr)
    return 1 if broken else 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="Train on one GPU and check the promises.")
    parser.add_argument("--small", action="store_true", help="a small model, for a few minutes")
    parser.add_argument("--out", type=Path, default=Path("bench/out"), help="folder of gpu.md and gpu.json")
    arguments = parser.parse_args()
    refused = refusal()
    if refused is not None:
        sys.exit(refused)
    sys.exit(run(SMALL if arguments.small else DEFAULT, arguments.out, about_here()))


if __name__ == "__main__":
    main()
