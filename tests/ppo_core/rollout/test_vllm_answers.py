"""A response that cannot be the answer to what was asked is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from ppo_core.errors import RolloutError
from ppo_core.rollout.engine import Response
from ppo_core.rollout.vllm_answers import Asked, in_order

ASKED = Asked(num_tokens=10, max_new_tokens=3, stop_ids=frozenset({2, 9}), has_stop_strings=False)


def found(ids: list[int], reason: str) -> dict[str, Any]:
    return {"row": 0, "prompt": [1], "ids": ids, "logprobs": [-1.0] * len(ids), "finish_reason": reason}


@pytest.mark.parametrize(("ids", "reason"), [([3, 4, 2], "stop"), ([9], "stop"), ([3, 4, 5], "length"), ([], "length")])
def test_what_can_be_right_is_taken_as_it_is(ids: list[int], reason: Any) -> None:
    assert ASKED.response("it", 0, found(ids, reason)) == Response(ids, reason, [-1.0] * len(ids))


@pytest.mark.parametrize(
    ("ids", "reason", "message"),
    [
        ([3], "abort", "it ended row 4 by 'abort'; expected 'stop' or 'length'"),
        ([3, 10], "length", "it drew id 10 in row 4, but the model has 10 ids"),
        ([3, -1], "length", "it drew id -1 in row 4"),
        ([3, 4, 5, 6], "length", "after 4 tokens; rollout.max_new_tokens is 3"),
        ([2, 3, 4], "length", "after 3 tokens, but token 1 is stop id 2: it does not end responses where"),
        ([3, 9, 2], "stop", "after 3 tokens, but token 2 is stop id 9"),
        ([3, 2], "length", "by 'length' after 2 tokens, but token 2 is stop id 2"),
        ([3, 4], "stop", "by 'stop' after 2 tokens, none of which is a stop id"),
    ],
)
def test_what_cannot_be_right_is_refused(ids: list[int], reason: str, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        ASKED.response("it", 4, found(ids, reason))


def test_a_stop_string_may_end_a_response_without_a_stop_id() -> None:
    asked = Asked(num_tokens=10, max_new_tokens=3, stop_ids=frozenset(), has_stop_strings=True)
    assert asked.response("it", 0, found([3, 4], "stop")).finish_reason == "stop"


def test_logprobs_that_are_not_finite_are_refused() -> None:
    with pytest.raises(RolloutError, match="it, row 0: its logits are not finite"):
        ASKED.response("it", 0, {**found([3], "length"), "logprobs": [float("nan")]})


def test_a_row_without_a_prompt_is_no_answer() -> None:
    with pytest.raises(RolloutError, match=r"it answered row 0, prompt \[\], where row 0, prompt \[1\], was asked"):
        in_order("it", [0], [[1]], [{**found([3], "length"), "prompt": None}])
