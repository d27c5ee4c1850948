"""The glossary keeps up with the words that the code uses, and pages with the addresses that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
GLOSSARY = (DOCS / "glossary.md").read_text(encoding="utf-8")
WORDS = """
prompt response rollout response_mask logprobs old_logprobs ref_logprobs score rewards values advantages returns
kl_to_ref kl_coef approx_kl ratio clip_range clip_fraction explained_variance entropy eos_rate response_length iteration
epoch minibatch microbatch policy reference critic judge run checkpoint lineage segment attempt gate
"""


@pytest.mark.parametrize("word", [*WORDS.split(), "reward model"])
def test_every_word_of_the_field_stands_in_the_glossary(word: str) -> None:
    headings = [line for line in GLOSSARY.splitlines() if line.startswith("**")]
    assert any(word in heading.strip("*").split(", ") for heading in headings)


def test_words_that_mean_the_same_here_are_not_used() -> None:
    for word in ("trajectory", "experience", "completion", "actor"):
        assert word not in GLOSSARY.lower()


@pytest.mark.parametrize("page", ["running.md", "going-back.md"])
def test_every_address_that_a_page_asks_is_one_of_the_api(page: str) -> None:
    known = json.loads((DOCS / "openapi.json").read_text(encoding="utf-8"))["paths"]
    patterns = [re.compile(re.sub(r"\{\w+\}", "[^/]+", path)) for path in known]
    asked = re.findall(r'\$API(/[^"?]*)', (DOCS / page).read_text(encoding="utf-8"))
    assert len(asked) > 5
    assert [path for path in asked if not any(pattern.fullmatch(f"/v1{path}") for pattern in patterns)] == []
