"""The weighted sum, and results that are no scores: found, counted by reason, left out, or too many."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ppo_core.errors import RewardError
from ppo_core.scoring.combine import Reward, clean, load_judge
from ppo_core.scoring.source import Unusable
from ppo_core.spec.scorers import REWARD_FUNCTIONS, JudgeConfig, RewardConfig, RewardSource
from tests.ppo_core.scoring.registered import register


class Scripted:
    """A source that gives back what it was told to."""

    def __init__(self, *results: object) -> None:
        self.results = list(results)
        self.closed = False

    def score(self, prompts: Sequence[str], responses: Sequence[str], check: object = None) -> Sequence[object]:
        return self.results

    def close(self) -> None:
        self.closed = True


def reward(*sources: tuple[Scripted, float], share: float = 0.9) -> Reward:
    return Reward(tuple(sources), share)


def test_the_score_is_the_weighted_sum_and_each_part_is_kept() -> None:
    scores = reward((Scripted(1.0, 2.0), 2.0), (Scripted(10, -10), 0.5)).score(["p"] * 2, ["a", "b"])
    assert scores.values.tolist() == [7.0, -1.0]
    assert [part.tolist() for part in scores.parts] == [[1.0, 2.0], [10.0, -10.0]]
    assert scores.values.dtype == torch.float64
    assert scores.valid.all()
    assert scores.reasons == {}


def test_what_is_no_score_is_left_out_and_counted() -> None:
    """T18: modelscope/ms-swift#8123."""
    scores = reward((Scripted(1.0, math.nan, None, math.inf, 0.5), 1.0)).score(["p"] * 5, ["r"] * 5)
    assert scores.valid.tolist() == [True, False, False, False, True]
    assert scores.values[scores.valid].tolist() == [1.0, 0.5]
    assert scores.values[~scores.valid].isnan().all()
    assert scores.reasons == {"nan": 1, "missing": 1, "infinite": 1}


def test_a_sum_that_float32_cannot_hold_is_left_out_as_infinite() -> None:
    """Training is in float32, where it would be infinite, and one infinite score spoils the moments of all."""
    scores = reward((Scripted(1e38, -1e300, 2.0), 10.0)).score(["p"] * 3, ["r"] * 3)
    assert scores.valid.tolist() == [False, False, True]
    assert scores.reasons == {"infinite": 2}


def test_a_fallback_stands_in_and_the_fault_is_counted_still() -> None:
    results = Scripted(1.0, math.nan, Unusable("timeout"), 0.5)
    scores = Reward(((results, 2.0),), 0.5, fallback=-3.0).score(["p"] * 4, ["r"] * 4)
    assert scores.values.tolist() == [2.0, -3.0, -3.0, 1.0]  # not weighted: it is the response's score
    assert scores.valid.all()
    assert scores.scored.tolist() == [True, False, False, True]
    assert scores.reasons == {"nan": 1, "timeout": 1}


def test_a_fallback_does_not_excuse_more_faults_than_allowed() -> None:
    with pytest.raises(RewardError, match="2 of 3 scores are unusable"):
        Reward(((Scripted(1.0, None, None), 1.0),), 0.5, fallback=0.0).score(["p"] * 3, ["r"] * 3)


def test_one_failed_source_makes_a_response_unusable_once() -> None:
    first, second = Scripted(1.0, Unusable("timeout"), 3.0), Scripted("good", None, 3.0)
    scores = reward((first, 1.0), (second, 0.0)).score(["p"] * 3, ["r"] * 3)
    assert scores.valid.tolist() == [False, False, True]
    assert scores.reasons == {"timeout": 1, "wrong_type": 1}
    assert scores.parts[0].tolist()[0] == 1.0


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (math.nan, "nan"),
        (-math.inf, "infinite"),
        (10**400, "infinite"),
        (None, "missing"),
        ("0.5", "wrong_type"),
        (True, "wrong_type"),
        ([0.5], "wrong_type"),
        (Unusable("died"), "died"),
    ],
)
def test_reasons(result: object, reason: str) -> None:
    (cleaned,) = clean([result], 1)
    assert isinstance(cleaned, Unusable)
    assert cleaned.reason == reason


def test_numbers_of_any_kind_are_scores() -> None:
    assert clean([1, torch.tensor(0.5).item(), torch.tensor([0.25]).numpy()[0]], 3) == [1.0, 0.5, 0.25]


def test_a_wrong_number_of_results_is_no_result_at_all() -> None:
    assert [each.reason for each in clean([1.0], 2) if isinstance(each, Unusable)] == ["wrong_count"] * 2
    assert [each.reason for each in clean(3.0, 2) if isinstance(each, Unusable)] == ["wrong_type"] * 2  # type: ignore[arg-type]


def test_too_many_unusable_scores_are_an_error_with_the_numbers() -> None:
    source = Scripted(*[1.0] * 18, None, Unusable("timeout", "no answer in time"))
    assert reward((source, 1.0), share=0.1).score(["p"] * 20, ["r"] * 20).reasons == {"missing": 1, "timeout": 1}
    source.results[0] = math.nan
    with pytest.raises(RewardError, match=r"3 of 20 scores are unusable \(1 nan, 1 missing, 1 timeout\), .* 10%"):
        reward((source, 1.0), share=0.1).score(["p"] * 20, ["r"] * 20)


def test_a_spec_becomes_a_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(tmp_path, monkeypatch, REWARD_FUNCTIONS)
    sources = [
        RewardSource(kind="python", name="length"),
        RewardSource(kind="python", name="response_length", weight=2.0),
    ]
    made = Reward.of(RewardConfig(sources=sources, fallback=0.25))
    assert made.fallback == 0.25
    assert made.score(["ab"], ["cde"]).values.tolist() == [7.0]
    made.close()


def test_the_examples_judge_is_loaded_by_its_registered_name() -> None:
    judge = load_judge(JudgeConfig(kind="python", name="vader"))
    good, bad = judge.score(["The film is"] * 2, [" wonderful.", " terrible."]).values.tolist()
    assert good > 0 > bad
    judge.close()


def test_closing_a_reward_closes_its_sources() -> None:
    source = Scripted(1.0)
    reward((source, 1.0)).close()
    assert source.closed
