"""Stages whose results are kept: each is built aside, renamed when finished, and found by a hash of its inputs."""

import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from examples.reviews.progress import Wait

FIGURES_FILE = "figures.json"


@dataclass(frozen=True)
class Stage:
    """One step of the preparation.

    `build` fills a folder and returns figures worth telling. The folder may hold what a killed build of the same key
    left there.
    """

    name: str
    title: str
    settings: tuple[Any, ...]  # dataclasses: everything the result depends on
    after: tuple["Stage", ...]
    build: Callable[[Path, Wait], dict[str, Any]]

    @property
    def key(self) -> str:
        """Hash of the name, the settings and the keys of the stages before."""
        inputs = [self.name, [asdict(part) for part in self.settings], [stage.key for stage in self.after]]
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]

    def folder(self, cache: Path) -> Path:
        """Where the finished result lies."""
        return cache / f"{self.name}-{self.key}"

    def figures(self, cache: Path) -> dict[str, Any]:
        """What `build` returned."""
        return json.loads((self.folder(cache) / FIGURES_FILE).read_text())


def run_stage(stage: Stage, cache: Path, wait: Callable[[str], Any]) -> None:
    """Build the stage unless its result is there."""
    finished = stage.folder(cache)
    if finished.exists():
        return
    partial = finished.with_name(finished.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    with wait(stage.title) as progress:
        figures = stage.build(partial, progress)
    (partial / FIGURES_FILE).write_text(json.dumps(figures))
    partial.rename(finished)


def publish(source: Path, target: Path) -> None:
    """Put a copy of a finished folder at `target`; a reader sees the old one, the new one, or for an instant none."""
    aside, old = (target.with_name(f".{target.name}.{kind}") for kind in ("aside", "old"))
    for leftover in (aside, old):
        shutil.rmtree(leftover, ignore_errors=True)
    shutil.copytree(source, aside, ignore=shutil.ignore_patterns(FIGURES_FILE))
    if target.exists():
        target.rename(old)
    aside.rename(target)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def only_one(cache: Path, on_busy: Callable[[], None]) -> Iterator[None]:
    """Hold the cache: a second preparation waits for the first, then finds its results."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_busy()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
