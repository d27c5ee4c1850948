"""The table of known faults names tests that exist, and no row that the trainer has to answer is missing."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TABLE = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
# Those of the maths, rollouts, rewards and the spec; T28 needs several ranks.
TRAINER_ROWS = [f"T{number:02d}" for number in (*range(1, 22), 27, 28, 33, 35, 36, 39, 41)]


# Those of queue, workers, records, logs, start and the doors to them.
PLATFORM_ROWS = [f"P{number:02d}" for number in (*range(1, 14), 19, 20, 24, 29, 32, 34, 41)]
PLATFORM_ROWS += [f"T{number:02d}" for number in (30, 31, 32, 38, 42, 43)]


def rows() -> dict[str, list[str]]:
    """The cells of each row of both tables, by its id."""
    lines = [line.strip("|").split("|") for line in TABLE.splitlines() if re.match(r"\| [PT]\d\d \|", line)]
    return {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines if len(line) == 5}


def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", [*TRAINER_ROWS, *PLATFORM_ROWS])
def test_a_row_has_an_outcome_tests_and_a_search(row: str) -> None:
    kind, outcome, tests, search = rows()[row]
    assert kind
    assert outcome
    assert search
    assert "::" in tests


@pytest.mark.parametrize(("row", "tests"), [(row, cells[2]) for row, cells in rows().items()])
def test_a_named_test_exists(row: str, tests: str) -> None:
    named = [name.split("::") for name in re.findall(r"`([^`]+)`", tests)]
    missing = [f"{path}::{name}" for path, name in named if name not in functions_of(path)]
    assert named
    assert not missing


def test_every_row_stands_once() -> None:
    ids = re.findall(r"^\| ([PT]\d\d) \|", TABLE, flags=re.MULTILINE)
    assert len(ids) == len(set(ids))
    assert [row for row in sorted(ids) if row[0] == "T"] == [f"T{number:02d}" for number in range(1, 44)]
