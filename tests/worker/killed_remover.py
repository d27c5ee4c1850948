"""Removes a run's checkpoints as the pruner does, and kills itself at a named point: `killed_remover.py POINT ...`."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from store.retention import rules_of
from store.session import make_engine, session_factory
from worker import agreement
from worker.prune import Pruner


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_after(work: Callable[..., Any]) -> Callable[..., None]:
    def run(*arguments: Any, **named: Any) -> None:
        work(*arguments, **named)
        die()

    return run


def removes_half(folder: Path, *_: object, **__: object) -> None:
    """`shutil.rmtree` that dies when it has removed one file."""
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    if files:
        files[0].unlink()
        die()


def main() -> None:
    point, url, run_id, token, run_dir = sys.argv[1:]
    match point:
        case "row":
            agreement.remove_checkpoint = die  # type: ignore[assignment]
        case "rename":
            Path.rename = dies_after(Path.rename)  # type: ignore[method-assign,assignment]
        case "half":
            shutil.rmtree = removes_half  # type: ignore[assignment]
        case "files":
            agreement.remove_checkpoint = dies_after(agreement.remove_checkpoint)  # type: ignore[assignment]
        case _:
            raise SystemExit(f"no point {point!r}")
    sessions = session_factory(make_engine(url))
    rules = rules_of({"checkpoints": {"keep_last": 2, "keep_best": 0}})
    Pruner(sessions, run_id, int(token), Path(run_dir), rules).prune()


if __name__ == "__main__":
    main()
