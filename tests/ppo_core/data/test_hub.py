"""Hub data sets, from a local cache as a download leaves it: nothing here asks the network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ppo_core.data.hub import numbered_prompts
from ppo_core.errors import DataError
from ppo_core.spec.hub import hub_dataset

COMMIT = "0" * 40


def cached(home: Path, files: dict[str, str]) -> None:
    """A data set `films/reviews` in the cache of the hub's client."""
    folder = home / "hub" / "datasets--films--reviews"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    for name, content in files.items():
        path = folder / "snapshots" / COMMIT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def read(home: Path, place: str, **more: str) -> str:
    """What a process says that reads `place`; the client takes cache and network from its environment."""
    program = (
        "import sys\nfrom ppo_core.data.hub import numbered_prompts\nfrom ppo_core.errors import DataError\n"
        "try: print(list(numbered_prompts(sys.argv[1])))\nexcept DataError as error: print('fault:', error)"
    )
    env = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "PPO_HUB_DATASETS": "a/b, films/reviews", **more}
    env = {name: value for name, value in env.items() if name not in ("HF_HUB_CACHE", "HF_TOKEN")}
    done = subprocess.run([sys.executable, "-c", program, place], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_files_of_a_split_are_read_in_order(tmp_path: Path) -> None:
    files = {
        "data/train-00001-of-00002.jsonl": '{"prompt": "three"}\n',
        "data/train-00000-of-00002.jsonl": '{"prompt": "one"}\n{"prompt": "two"}\n',
        "data/test-00000-of-00001.jsonl": '{"prompt": "other"}\n',
        "data/trainers.jsonl": '{"prompt": "no split"}\n',
        "train.py": "raise SystemExit",
    }
    cached(tmp_path, files)
    assert read(tmp_path, "hub:films/reviews") == "[(1, 'one'), (2, 'two'), (1, 'three')]"
    assert read(tmp_path, "hub:films/reviews:test") == "[(1, 'other')]"
    assert "has no .parquet, .jsonl or .csv file of the split 'dev'" in read(tmp_path, "hub:films/reviews:dev")


def test_a_bad_row_is_told_with_its_file(tmp_path: Path) -> None:
    cached(tmp_path, {"train.csv": "prompt\nx\n \n"})
    said = read(tmp_path, "hub:films/reviews")
    assert said.startswith("fault: ")
    assert "train.csv, row 3: the prompt is empty" in said


def test_a_split_in_two_places_is_told(tmp_path: Path) -> None:
    cached(tmp_path, {"en/train.jsonl": '{"prompt": "x"}\n', "de/train.jsonl": '{"prompt": "y"}\n'})
    assert "more than once (de/*.jsonl, en/*.jsonl)" in read(tmp_path, "hub:films/reviews")


def test_what_cannot_be_fetched_is_told(tmp_path: Path) -> None:
    """Offline without a cache, and with a hub that nobody answers for."""
    said = read(tmp_path, "hub:films/reviews")
    assert said.startswith("fault: hub:films/reviews cannot be fetched: ")
    nobody = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:1"}
    assert read(tmp_path, "hub:films/reviews", **nobody).startswith("fault: hub:films/reviews cannot be fetched: ")


@pytest.mark.parametrize("text", ["hub:", "hub:name", "hub:../x", "hub:a/b/c", "hub:a/..", "hub:a/b:", "hub:a/b:c/d"])
def test_what_names_no_data_set_is_told(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPO_HUB_DATASETS", "a/b,../x,a/..")
    with pytest.raises(ValueError, match=r"names no data set of the hub; write hub:owner/name"):
        hub_dataset(text)


def test_a_data_set_that_is_not_listed_is_refused_even_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPO_HUB_DATASETS", "a/b")
    assert hub_dataset("hub:a/b") == ("a/b", "train")
    assert hub_dataset("hub:a/b:dev") == ("a/b", "dev")
    with pytest.raises(DataError, match=r"'films/reviews' is not one that this server fetches \(a/b\)"):
        list(numbered_prompts("hub:films/reviews"))
    monkeypatch.delenv("PPO_HUB_DATASETS")
    with pytest.raises(ValueError, match=r"fetches \(none\); whoever runs it lists it in PPO_HUB_DATASETS"):
        hub_dataset("hub:a/b")
