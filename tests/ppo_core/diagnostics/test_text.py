"""Text statistics against numbers counted by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_core.diagnostics import text

responses = st.lists(st.lists(st.integers(0, 3), max_size=8), max_size=6)


def test_distinct_2_counts_pairs_over_all_responses() -> None:
    assert text.distinct_2([[1, 2, 1, 2], [1, 2]]) == 0.5
    assert text.distinct_2([[1, 2, 3]]) == 1.0


def test_distinct_2_never_pairs_across_responses() -> None:
    assert text.distinct_2([[1, 2], [3, 4]]) == 1.0
    assert text.distinct_2([[1], [2], []]) is None


def test_repeat_3_counts_within_one_response_only() -> None:
    assert text.repeat_3([[1, 2, 3, 1, 2, 3]]) == 0.25
    assert text.repeat_3([[1, 2, 3], [1, 2, 3]]) == 0.0
    assert text.repeat_3([[7, 7, 7, 7, 7], [1, 2, 3]]) == 0.5  # 777 twice again among 3 + 1 runs


def test_repeat_3_of_short_responses_is_undefined() -> None:
    assert text.repeat_3([[1, 2], []]) is None


def test_identical_counts_every_twin() -> None:
    assert text.identical([[1], [2], [1], [1], [3]]) == 0.6
    assert text.identical([[1], [2]]) == 0.0
    assert text.identical([]) is None


def test_two_empty_responses_are_identical() -> None:
    assert text.identical([[], [], [4]]) == pytest.approx(2 / 3)


def test_words_are_lower_case_with_inner_apostrophes() -> None:
    assert text.words("Don't -- it's 'GREAT', 10/10!") == ["don't", "it's", "great", "10", "10"]


def test_distinct_words_are_compared_at_equal_word_count() -> None:
    assert text.distinct_word_share(["a b a", "b c"]) == 0.6
    assert text.distinct_word_share(["a b a", "b c"], num_words=3) == pytest.approx(2 / 3)
    assert text.distinct_word_share(["a b"], num_words=3) is None
    assert text.distinct_word_share(["...", ""]) is None


def test_most_common_text_ignores_white_space_at_its_ends() -> None:
    assert text.most_common_share(["good", " good\n", "bad", "good film"]) == 0.5
    assert text.most_common_share([]) is None


@given(responses)
def test_order_of_responses_changes_nothing(batch: list[list[int]]) -> None:
    turned = batch[::-1]
    assert text.distinct_2(batch) == text.distinct_2(turned)
    assert text.repeat_3(batch) == text.repeat_3(turned)
    assert text.identical(batch) == text.identical(turned)


@given(responses)
def test_shares_lie_between_0_and_1(batch: list[list[int]]) -> None:
    for share in (text.distinct_2(batch), text.repeat_3(batch), text.identical(batch)):
        assert share is None or 0 <= share <= 1
