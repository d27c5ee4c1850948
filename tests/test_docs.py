"""The glossary keeps up with the words that the code uses."""

from __future__ import annotations

from pathlib import Path

import pytest

GLOSSARY = (Path(__file__).resolve().parents[1] / "docs" / "glossary.md").read_text(encoding="utf-8")
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
