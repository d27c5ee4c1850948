"""Runs the measurements named on the command line, or all of them: `python -m bench [NAME ...]`."""

from __future__ import annotations

import sys
from collections.abc import Callable

from bench import head_memory, start

ALL: dict[str, Callable[[], None]] = {"start": start.main, "head-memory": head_memory.main}


def main() -> None:
    names = sys.argv[1:] or list(ALL)
    unknown = [name for name in names if name not in ALL]
    if unknown:
        sys.exit(f"no measurement is called {', '.join(unknown)}; there are: {', '.join(ALL)}")
    for name in names:
        print(f"== {name}")
        ALL[name]()


if __name__ == "__main__":
    main()
