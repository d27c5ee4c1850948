"""Every average in `ppo_core` is masked: no mean, variance or deviation is taken outside masked.py."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PPO_CORE = Path(__file__).parents[2] / "ppo_core"
FORBIDDEN = {"mean", "std", "var", "nanmean", "std_mean", "var_mean"}


def loose_means(source: str) -> list[int]:
    """Lines that call x.mean() and the like, name torch.mean and the like, or import them from torch."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FORBIDDEN
        named = (
            isinstance(node, ast.Attribute)
            and node.attr in FORBIDDEN
            and isinstance(node.value, ast.Name)
            and node.value.id == "torch"
        )
        imported = (
            isinstance(node, ast.ImportFrom)
            and node.module == "torch"
            and any(alias.name in FORBIDDEN for alias in node.names)
        )
        if called or named or imported:
            lines.append(node.lineno)
    return sorted(set(lines))


def test_means_are_taken_in_masked_only() -> None:
    modules = [path for path in PPO_CORE.rglob("*.py") if path != PPO_CORE / "masked.py"]
    assert len(modules) > 5
    found = [f"{path.relative_to(PPO_CORE)}:{line}" for path in modules for line in loose_means(path.read_text())]
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "x.mean()",
        "x[mask].std(dim=1)",
        "(a + b).var(unbiased=False)",
        "torch.mean(x)",
        "list(map(torch.std, xs))",
        "from torch import var_mean",
    ],
)
def test_a_loose_mean_is_found(source: str) -> None:
    assert loose_means(source) == [1]


@pytest.mark.parametrize("source", ["masked_mean(x, mask)", "stats.ratio_mean", "report.mean", "'x.mean()'"])
def test_a_masked_mean_and_a_field_of_that_name_are_not(source: str) -> None:
    assert loose_means(source) == []
