"""Scores on their way to training: each stage by hand, their order, and running moments against all scores at once."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ppo_core.errors import ShapeError
from ppo_core.masked import masked_correlation
from ppo_core.score_shaping import (
    RunningMoments,
    ShapedScores,
    length_slope,
    moments_to_start_from,
    shape_scores,
    without_length,
)
from ppo_core.spec.scorers import RewardConfig

SOURCES = [{"kind": "python", "name": "r"}]


def config(**fields: Any) -> RewardConfig:
    return RewardConfig.model_validate({"sources": SOURCES, "missing_eos_penalty": 0.0, **fields})


def shaped(
    scores: list[float],
    lengths: list[int] | None = None,
    truncated: list[bool] | None = None,
    moments: RunningMoments | None = None,
    **fields: Any,
) -> ShapedScores:
    return shape_scores(
        torch.tensor(scores),
        torch.tensor(lengths or [1] * len(scores)),
        torch.tensor(truncated or [False] * len(scores)),
        moments or RunningMoments(),
        config(**fields),
    )


def correlation(x: Tensor, y: Tensor) -> float:
    found = masked_correlation(x.double(), y.double(), torch.ones_like(x, dtype=torch.bool))
    assert found is not None
    return found


# Length baseline


def noisy(dtype: torch.dtype, num: int = 256) -> tuple[Tensor, Tensor]:
    """score = 1.5 + 0.06 · length + noise, and the lengths."""
    stream = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 65, (num,), generator=stream)
    noise = torch.randn(num, generator=stream, dtype=torch.float64)
    return (1.5 + 0.06 * lengths + 0.3 * noise).to(dtype), lengths


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_score_that_pays_for_length_pays_no_more(dtype: torch.dtype) -> None:
    scores, lengths = noisy(dtype)
    assert correlation(scores, lengths) > 0.9
    found = shape_scores(scores, lengths, lengths > 64, RunningMoments(), config(length_baseline="linear"))
    assert found.length_slope == pytest.approx(0.06, abs=0.003)
    assert abs(correlation(found.corrected, lengths)) < 1e-6
    assert float(found.corrected.double().sum() / 256) == pytest.approx(float(scores.double().sum() / 256), abs=1e-6)
    assert found.corrected.dtype == found.trained.dtype == dtype
    assert torch.equal(found.raw, scores)
    assert torch.equal(found.trained, found.corrected)


def test_a_baseline_by_hand() -> None:
    """Lengths 1 2 3 about 2, scores 1 1 4: slope 3/2, so 1.5 0 -1.5 are added."""
    found = shaped([1.0, 1.0, 4.0], [1, 2, 3], length_baseline="linear")
    assert found.length_slope == 1.5
    assert found.corrected.tolist() == [2.5, 1.0, 2.5]


def test_equal_lengths_change_nothing() -> None:
    found = shaped([1.0, -2.0, 4.0], [7, 7, 7], length_baseline="linear")
    assert found.length_slope is None
    assert torch.equal(found.corrected, found.raw)


@pytest.mark.parametrize("lengths", [[], [3], [3, 9]])
def test_fewer_than_three_responses_tell_no_line(lengths: list[int]) -> None:
    scores = [float(length) for length in lengths]
    found = shape_scores(
        torch.tensor(scores),
        torch.tensor(lengths),
        torch.zeros(len(lengths), dtype=torch.bool),
        RunningMoments(),
        config(length_baseline="linear"),
    )
    assert found.length_slope is None
    assert found.trained.tolist() == scores


def test_without_a_baseline_the_slope_is_still_told() -> None:
    found = shaped([1.0, 1.0, 4.0], [1, 2, 3])
    assert found.length_slope == 1.5
    assert torch.equal(found.corrected, found.raw)


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(0, 4096)), min_size=3, max_size=40))
def test_corrected_scores_have_the_mean_of_the_raw_and_no_slope(rows: list[tuple[float, int]]) -> None:
    scores = torch.tensor([score for score, _ in rows], dtype=torch.float64)
    lengths = torch.tensor([length for _, length in rows])
    corrected = without_length(scores, lengths, length_slope(scores, lengths))
    assert float((corrected - scores).sum()) == pytest.approx(0.0, abs=1e-8)
    assert length_slope(corrected, lengths) in (None, pytest.approx(0.0, abs=1e-9))


# Running moments and normalisation


@given(st.lists(st.lists(st.floats(-1e6, 1e6), max_size=12), min_size=1, max_size=8))
def test_moments_of_batches_are_those_of_all_scores_at_once(batches: list[list[float]]) -> None:
    moments = RunningMoments()
    for batch in batches:
        moments = moments.merged_with(torch.tensor(batch, dtype=torch.float64))
    everything = [score for batch in batches for score in batch]
    assert moments.count == len(everything)
    if everything:
        mean = math.fsum(everything) / len(everything)
        variance = math.fsum((score - mean) ** 2 for score in everything) / len(everything)
        assert moments.mean == pytest.approx(mean, rel=1e-9, abs=1e-6)
        assert moments.deviation == pytest.approx(math.sqrt(variance), rel=1e-6, abs=1e-4)


def test_a_large_offset_costs_no_digits() -> None:
    """Scores 1e9 + (0 1 2 ...): the deviation of 0 to 99, whose variance is (100² - 1) / 12."""
    moments = RunningMoments()
    for start in range(0, 100, 10):
        moments = moments.merged_with(1e9 + torch.arange(start, start + 10, dtype=torch.float64))
    assert moments.mean == pytest.approx(1e9 + 49.5, abs=1e-6)
    assert moments.deviation == pytest.approx(math.sqrt(9999 / 12), rel=1e-9)


def test_normalisation_by_hand() -> None:
    """0 2 then 4 6: the mean 3, the variance (9 + 1 + 1 + 9) / 4 = 5; only the second batch is given back."""
    first = shaped([0.0, 2.0], normalize=True)
    assert first.normalized.tolist() == pytest.approx([-1.0, 1.0])
    second = shaped([4.0, 6.0], moments=first.moments, normalize=True)
    assert second.moments.count == 4
    assert second.moments.mean == 3.0
    assert second.moments.deviation == pytest.approx(math.sqrt(5))
    assert second.normalized.tolist() == pytest.approx([1 / math.sqrt(5), 3 / math.sqrt(5)])


@pytest.mark.parametrize("value", [0.0, 0.1, -7.3, 1e30])
@pytest.mark.parametrize("num", [1, 3, 7])
def test_equal_scores_become_zero_in_every_iteration(value: float, num: int) -> None:
    moments = RunningMoments()
    for _ in range(3):
        found = shaped([value] * num, moments=moments, normalize=True)
        moments = found.moments
        assert found.trained.tolist() == [0.0] * num


def test_an_iteration_without_a_usable_score_leaves_the_moments() -> None:
    before = RunningMoments(4, 1.0, 8.0)
    assert before.merged_with(torch.zeros(0)) == before
    assert RunningMoments().deviation == 0.0


def test_moments_are_kept_when_normalisation_is_off() -> None:
    found = shaped([0.0, 2.0])
    assert found.moments == RunningMoments(2, 1.0, 2.0)
    assert torch.equal(found.normalized, found.raw)


def test_moments_go_through_json_unchanged() -> None:
    moments = RunningMoments().merged_with(torch.tensor([0.1, 0.7, 1 / 3], dtype=torch.float64))
    assert RunningMoments.of(json.loads(json.dumps(moments.as_dict()))) == moments
    assert RunningMoments.of(None) == RunningMoments()


# The order


def test_every_stage_by_hand_in_its_order() -> None:
    """Scores 0 5 1 of lengths 1 3 2, the last answer cut off.

    Distances from the means are -2 3 -1 and -1 1 0: slope (2 + 3) / 2 = 2.5, corrected 2.5 2.5 1. Their mean is 2 and
    their variance .5, so a deviation is √.5; the penalty -1 meets the last one alone, and so does the limit 1.5.
    """
    found = shaped(
        [0.0, 5.0, 1.0],
        [1, 3, 2],
        [False, False, True],
        length_baseline="linear",
        normalize=True,
        missing_eos_penalty=-1.0,
        clip=1.5,
    )
    unit = 1 / math.sqrt(0.5)
    assert found.length_slope == pytest.approx(2.5, rel=1e-12)
    assert found.corrected.tolist() == [2.5, 2.5, 1.0]
    assert found.normalized.tolist() == pytest.approx([0.5 * unit, 0.5 * unit, -1.0 * unit])
    assert found.penalized.tolist() == pytest.approx([0.5 * unit, 0.5 * unit, -1.0 * unit - 1])
    assert found.trained.tolist() == pytest.approx([0.5 * unit, 0.5 * unit, -1.5])


def test_the_penalty_keeps_its_size_when_all_answers_are_cut_off() -> None:
    """Were it given before the normalisation, the running mean would take it off again."""
    found = shaped([1.0, 3.0], truncated=[True, True], normalize=True, missing_eos_penalty=-1.0)
    assert found.trained.tolist() == pytest.approx([-2.0, 0.0])


def test_the_penalty_moves_no_moments() -> None:
    with_penalty = shaped([1.0, 3.0], truncated=[True, False], missing_eos_penalty=-50.0)
    assert with_penalty.moments == shaped([1.0, 3.0]).moments


def test_with_everything_off_the_score_passes_through() -> None:
    found = shaped([1.0, 2.5, -3.0], [1, 2, 3], [True, False, False])
    for stage in (found.corrected, found.normalized, found.penalized, found.trained):
        assert torch.equal(stage, found.raw)


def test_row_order_changes_nothing() -> None:
    scores, lengths = noisy(torch.float64, 33)
    truncated = lengths > 50
    everything = config(length_baseline="linear", normalize=True, missing_eos_penalty=-1.0, clip=2.0)
    order = torch.randperm(33, generator=torch.Generator().manual_seed(1))
    one = shape_scores(scores, lengths, truncated, RunningMoments(), everything)
    other = shape_scores(scores[order], lengths[order], truncated[order], RunningMoments(), everything)
    assert torch.allclose(one.trained[order], other.trained, atol=1e-12)


def test_shapes_must_agree() -> None:
    with pytest.raises(ShapeError, match=r"lengths has shape \[1\], scores \[2\]"):
        shaped([1.0, 2.0], [1])


# What a restart takes over


@pytest.mark.parametrize(
    ("change", "is_kept"),
    [
        ({}, True),
        ({"missing_eos_penalty": -3.0, "clip": 2.0, "normalize": True}, True),
        ({"length_baseline": "linear"}, False),
        ({"sources": [{"kind": "python", "name": "another"}]}, False),
        ({"sources": [{"kind": "python", "name": "r", "weight": 2.0}]}, False),
    ],
)
def test_moments_of_another_score_begin_anew(change: dict[str, Any], is_kept: bool) -> None:
    kept = RunningMoments(4, 1.0, 8.0).as_dict()
    then = {"reward": config().model_dump(mode="json")}
    assert moments_to_start_from(kept, then, config(**change)) == (kept if is_kept else None)


def test_how_a_service_is_asked_is_no_other_score() -> None:
    """Retries, batch size and the spelling of an address change no score; the path does."""

    def reward(url: str, **how: int) -> RewardConfig:
        return RewardConfig.model_validate({"sources": [{"kind": "http", "url": url, **how}]})

    kept = RunningMoments(4, 1.0, 2.0).as_dict()
    then = {"reward": reward("https://rm.example/score").model_dump(mode="json")}
    same = reward("https://RM.example:443/score", retries=0, batch_size=7)
    assert moments_to_start_from(kept, then, same) == kept
    assert moments_to_start_from(kept, then, reward("https://rm.example/other")) is None
