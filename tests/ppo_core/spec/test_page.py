"""The page about the spec is what the fields say, and every field stands in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo_core.spec import RunSpec
from ppo_core.spec.fields import every_field
from ppo_core.spec.page import page

SPEC_PAGE = Path(__file__).resolve().parents[3] / "docs" / "spec.md"


def test_docs_are_what_the_spec_says() -> None:
    assert SPEC_PAGE.read_text(encoding="utf-8") == page(), "run `python -m ppo_core.spec > docs/spec.md`"


@pytest.mark.parametrize("name", [name for name, _ in every_field(RunSpec)])
def test_every_config_field_stands_in_the_docs(name: str) -> None:
    assert f"| `{name}` |" in SPEC_PAGE.read_text(encoding="utf-8")
