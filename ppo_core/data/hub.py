"""Fetches the files of a hub data set's split into the local cache. Data files alone: no code of it is ever run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from ppo_core.errors import DataError
from ppo_core.spec.hub import hub_dataset, is_hub
from ppo_core.spec.prompt_files import prompts_of
from ppo_core.spec.prompt_rows import Prompt

_ENDINGS = ("parquet", "jsonl", "csv", "json")


def numbered_prompts(place: str) -> Iterator[tuple[int, Prompt]]:
    """Every prompt of a file, a folder or a hub data set, with its row's number in its file.

    Raises:
        DataError: a row is unfit (file and row are named), or what is named cannot be fetched or read.
    """
    for path in _split_files(place) if is_hub(place) else [Path(place)]:
        yield from prompts_of(path)


def _split_files(place: str) -> list[Path]:
    """The files of a split in the order of their names, fetched if the cache has not got them."""
    try:
        name, split = hub_dataset(place)
    except ValueError as error:
        raise DataError(str(error)) from error
    try:
        folder = Path(
            snapshot_download(
                name,
                repo_type="dataset",
                allow_patterns=[f"*{split}*.{ending}" for ending in _ENDINGS],
                etag_timeout=30,
            )
        )
    except (OSError, ValueError, HfHubHTTPError, httpx.HTTPError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise DataError(
            f"{place} cannot be fetched: {first}",
            hint="See to the way to the hub, the name and the right to read it; or give a file.",
        ) from error
    word = re.compile(rf"(?:^|[/._-]){re.escape(split)}(?:[/._-]|$)")
    found = [path for path in folder.rglob("*") if path.suffix[1:] in _ENDINGS]
    files = sorted(path for path in found if word.search(path.relative_to(folder).with_suffix("").as_posix()))
    if not files:
        raise DataError(f"{place} has no .parquet, .jsonl or .csv file of the split {split!r}")
    kinds = sorted({f"{path.parent.relative_to(folder).as_posix()}/*{path.suffix}" for path in files})
    if len(kinds) > 1:
        raise DataError(
            f"{place} has the split {split!r} more than once ({', '.join(kinds)})",
            hint="Save the one that is meant to a file or folder, and give that.",
        )
    return files
