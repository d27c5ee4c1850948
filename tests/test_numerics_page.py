"""The page on the numbers names every function whose contract is fixed, and no function that is not there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

PAGE = (Path(__file__).parents[1] / "docs" / "numerics.md").read_text(encoding="utf-8")
CONTRACT = [
    *("alignment.token_logprobs", "alignment.response_mask"),
    *("masked.masked_mean", "masked_var", "masked_whiten"),
    *("rewards.kl_penalty", "rewards.per_token_rewards"),
    "advantages.gae",
    *("losses.policy_loss", "losses.value_loss", "losses.entropy"),
    "diagnostics.explained_variance",
]


def test_every_function_of_the_contract_is_on_the_page() -> None:
    assert [name for name in CONTRACT if name not in PAGE] == []


def test_what_the_page_names_exists() -> None:
    named = re.findall(r"`(ppo_core(?:\.\w+)+)`", PAGE)
    assert len(named) >= 10
    for path in named:
        module, _, name = path.rpartition(".")
        try:
            importlib.import_module(path)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(module), name), path


def test_tests_that_the_page_names_exist() -> None:
    for path in re.findall(r"`(tests/[\w/.]+)`", PAGE):
        assert (Path(__file__).parents[1] / path).exists(), path
