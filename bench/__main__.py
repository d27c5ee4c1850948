"""Runs the measurements named on the command line, or all of them: `python -m bench [NAME ...]`."""

from __future__ import annotations

import sys
from collections.abc import Callable

from bench import head_memory, start

ALL: dict[str, Callable[[], None]] = {"start": start.main, "head-memory": head_memory.main}
# Needs a GPU and minutes: told of here, started by its own name.
APART = "gpu: python -m bench.gpu [--small], on a machine with one GPU"


def main() -> None:
    names = sys.argv[1:] or list(ALL)
    unknown = [name for name in names if name not in ALL]
    if unknown:
        sys.exit(f"no measurement is called {', '.join(unknown)}; there are: {', '.join(ALL)}; {APART}")
    for name in names:
        print(f"== {name}")
        ALL[name]()
    print(f"apart from these: {APART}")


if __name__ == "__main__":
    main()
