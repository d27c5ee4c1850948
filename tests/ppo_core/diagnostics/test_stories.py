"""Each story is told of metrics that show it, of metrics that show it in another way, and of none that do not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from ppo_core.diagnostics.alerts import Payload
from ppo_core.diagnostics.stories import READ_BY_STORIES, STORIES
from ppo_core.registry import METRICS
from ppo_core.spec import changeable, parse_spec
from ppo_core.spec.changes import apply_settings
from tests.ppo_core.diagnostics.made_runs import RAW, Change, alerts_of, healthy, made_spec, watch_of

BEGAN = 100


def _grown(iteration: int, factor: float, over: int = 60) -> float:
    """1 up to `BEGAN`, then in a straight line to `factor`."""
    return 1 + (factor - 1) * min(1.0, max(0, iteration - BEGAN) / over)


def long_and_cut(iteration: int) -> Mapping[str, float]:
    return {
        "response/length_mean": 30 * _grown(iteration, 2.0),
        "response/eos_rate": 0.97 - 0.25 * (_grown(iteration, 2.0) - 1),
        "reward/score_mean": 1.0 * _grown(iteration, 2.0) + iteration / 1000,
        "kl/ref_sequence": 4 * _grown(iteration, 6.0),
        "kl/ref_sequence_k3": 4 * _grown(iteration, 6.0),
        "kl/ref_token_k3": 4 / 30 * _grown(iteration, 6.0),
    }


def long_and_paid(iteration: int) -> Mapping[str, float]:
    """The same story without a fall of the EOS rate, and without a change of the KL."""
    return {
        "response/length_mean": 30 * _grown(iteration, 2.0),
        "reward/score_mean": 1.0 * _grown(iteration, 2.0) + iteration / 1000,
        "reward/length_slope": 0.05,
        "response/repeat_3": 0.05 * _grown(iteration, 6.0),
    }


def alike(iteration: int) -> Mapping[str, float]:
    share = _grown(iteration, 2.0) - 1
    return {
        "reward/score_mean": iteration / 100,
        "response/distinct_2": 0.8 - 0.6 * share,
        "response/identical": 0.8 * share,
        "policy/entropy": 3.0 - 0.5 * share,
    }


def alike_and_long(iteration: int) -> Mapping[str, float]:
    """A form that is repeated: answers grow with it, end less often, and have few more pairs to show for it."""
    share = _grown(iteration, 2.0) - 1
    return {
        "reward/score_mean": iteration / 100,
        "reward/length_slope": 0.05,
        "response/length_mean": 30 * (1 + share),
        "response/eos_rate": 0.97 - 0.25 * share,
        "response/distinct_2": 0.8 * (1 - 0.45 * share),
        "policy/entropy": 3.0 - 1.5 * share,
    }


def going_round(iteration: int) -> Mapping[str, float]:
    share = _grown(iteration, 2.0) - 1
    return {
        "reward/score_mean": iteration / 100,
        "response/repeat_3": 0.05 + 0.6 * share,
        "policy/entropy": 3.0 - 1.6 * share,
    }


def certain(iteration: int) -> Mapping[str, float]:
    return {"policy/entropy": 3.0 / _grown(iteration, 3.0), "reward/score_mean": 0.5}


def running(iteration: int) -> Mapping[str, float]:
    kl = 4 * 1.05 ** max(0, iteration - BEGAN)
    return {"kl/ref_sequence": kl, "kl/ref_sequence_k3": kl, "kl/ref_token": kl / 30, "kl/ref_token_k3": kl / 30}


def blind_and_still(iteration: int) -> Mapping[str, float]:
    return {"value/explained_variance_return": 0.0, "value/mean": 0.0, "value/grad_norm": 0.0}


def blind_and_clipped(iteration: int) -> Mapping[str, float]:
    return {"value/explained_variance_return": 0.02, "value/clip_fraction": 0.8}


def far_by_the_last_epoch(iteration: int) -> Mapping[str, float]:
    late = iteration > BEGAN
    return {
        "policy/approx_kl/epoch_2": 0.3 if late else 0.007,
        "policy/clip_fraction/epoch_2": 0.5 if late else 0.09,
        "policy/approx_kl": 0.15 if late else 0.004,
    }


def cut(iteration: int) -> Mapping[str, float]:
    return {"response/eos_rate": 0.5, "response/length_mean": 25.0} if iteration > BEGAN else {}


def fewer_rows(iteration: int) -> Mapping[str, float]:
    return {"rollout/rows_at_once": 32.0 if iteration > BEGAN else 64.0}


def neighbours(iteration: int) -> Mapping[str, float]:
    return {"rollout/engine_gap_mean": 1.3, "rollout/engine_gap_max": 9.0}


def stale(iteration: int) -> Mapping[str, float]:
    return {"rollout/engine_gap_mean": 1e-6 + 0.002 * max(0, iteration - BEGAN)}


def stale_in_bfloat16(iteration: int) -> Mapping[str, float]:
    return {"rollout/engine_gap_mean": 0.01 + 0.002 * max(0, iteration - BEGAN), "rollout/engine_gap_max": 0.2}


def same_numbers(iteration: int) -> Mapping[str, float]:
    return {"rollout/engine_gap_mean": 0.0, "rollout/engine_gap_max": 0.0}


def padded(iteration: int) -> Mapping[str, float]:
    return {name: (healthy(iteration)[name] or 0) * 0.7 for name in ("kl/ref_token", "kl/ref_token_k3")}


SHOWN: list[tuple[str, Change, int]] = [  # story, metrics, the first iteration that its onset may have
    ("length_hacking", long_and_cut, BEGAN),
    ("length_hacking", long_and_paid, BEGAN),
    ("reward_hacking", alike, BEGAN),
    ("reward_hacking", alike_and_long, BEGAN),
    ("reward_hacking", going_round, BEGAN),
    ("entropy_collapse", certain, BEGAN),
    ("kl_runaway", running, BEGAN - 20),
    ("critic_not_learning", blind_and_still, 0),
    ("critic_not_learning", blind_and_clipped, 0),
    ("too_many_epochs", far_by_the_last_epoch, BEGAN),
    ("generation_cut_off", cut, BEGAN),
    ("out_of_memory_in_generation", fewer_rows, BEGAN),
    ("off_by_one", neighbours, 0),
    ("weights_out_of_sync", stale, BEGAN),
    ("weights_out_of_sync", stale_in_bfloat16, BEGAN),
    ("engine_logprobs", same_numbers, 0),
    ("padding_in_averages", padded, 0),
]
IDS = [change.__name__ for _, change, _ in SHOWN]


def stories_of(change: Change, **more: Any) -> list[Payload]:
    return [alert for alert in alerts_of(change, **more) if alert["kind"] == "story"]


@pytest.mark.parametrize(("story", "change", "first"), SHOWN, ids=IDS)
def test_the_right_story_is_told_first_and_with_evidence(story: str, change: Change, first: int) -> None:
    stories = stories_of(change)
    assert stories, "nothing was told"
    raised = stories[0]
    assert raised["rule"] == f"story:{story}"
    assert raised["iteration"] <= BEGAN + 70
    assert first <= raised["onset"] <= raised["iteration"]
    assert raised["evidence"]
    assert raised["metrics"][0] == raised["evidence"][0]["metric"]
    for sign in raised["evidence"]:
        assert set(sign) == {"metric", "then", "now", "text"}
        assert sign["metric"] in raised["snapshot"]
    assert raised["meaning"] == STORIES[story].meaning
    assert [(each["rule"], each["status"]) for each in stories].count((raised["rule"], "raised")) == 1


def test_every_story_is_shown() -> None:
    assert {story for story, _, _ in SHOWN} == set(STORIES)


def at(iteration: int) -> tuple[str, int] | None:
    """A checkpoint every 20 iterations."""
    before = (iteration - 1) // 20 * 20
    return (f"1:{before}", before) if before else None


@pytest.mark.parametrize(("story", "change", "first"), SHOWN, ids=IDS)
def test_its_fix_is_what_a_roll_back_may_do(story: str, change: Change, first: int) -> None:
    raised = next(each for each in stories_of(change, watch=watch_of(made_spec(), at)) if each["status"] == "raised")
    suggestion = raised["suggestion"]
    if suggestion is None:
        assert story in ("off_by_one", "engine_logprobs", "padding_in_averages")
        return
    if suggestion["checkpoint"] is not None:
        assert int(suggestion["checkpoint"].removeprefix("1:")) < raised["onset"]
    assert all(changeable(name) == "rollback" for name in suggestion["changes"])
    spec = made_spec().model_dump(mode="json")
    changed = parse_spec(apply_settings(spec, suggestion["changes"])).model_dump(mode="json")
    assert (changed != spec) == bool(suggestion["changes"])


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"kl": {"coef": 0.0}},
        {"kl": {"coef": 90.0}},
        {"update": {"epochs": 2, "entropy_coef": 9.0, "value_learning_rate": 0.9}},
        {"kl": {"controller": "adaptive", "target": 6.0, "horizon": 10000}},
        {"reward": {**RAW["reward"], "missing_eos_penalty": -900.0}},
    ],
)
def test_a_fix_is_within_bounds_whatever_the_settings(raw: dict[str, Any]) -> None:
    from ppo_core.diagnostics.remedies import changes_for

    spec = made_spec(**raw)
    for story in [*STORIES, "gate:judge"]:
        changes = changes_for(story, spec, set(READ_BY_STORIES), 40)
        parse_spec(apply_settings(spec.model_dump(mode="json"), changes))


@pytest.mark.parametrize(("context", "longer"), [(None, 80), (100, 80), (76, 60), (56, None)])
def test_longer_answers_are_proposed_only_as_far_as_the_context_goes(context: int | None, longer: int | None) -> None:
    from ppo_core.diagnostics.remedies import changes_for

    spec = made_spec(data={**RAW["data"], "max_prompt_tokens": 16}, rollout={"max_new_tokens": 40})
    changes = changes_for("generation_cut_off", spec, set(), 40, context)
    assert changes == ({} if longer is None else {"rollout.max_new_tokens": longer})


def better_and_longer(iteration: int) -> Mapping[str, float]:
    """Answers that are longer since more has to be said: they end as before, and are not poorer."""
    return {"response/length_mean": 30 * _grown(iteration, 1.45), "reward/score_mean": iteration / 100}


def longer_for_nothing(iteration: int) -> Mapping[str, float]:
    return {"response/length_mean": 30 * _grown(iteration, 1.45), "reward/score_mean": 0.5, "reward/length_slope": 0.0}


def kl_that_comes_to_rest(iteration: int) -> Mapping[str, float]:
    kl = 20 * (1 - math.exp(-iteration / 25))
    return {"kl/ref_sequence": kl, "kl/ref_sequence_k3": kl, "kl/ref_token": kl / 30, "kl/ref_token_k3": kl / 30}


def hard_to_foresee(iteration: int) -> Mapping[str, float]:
    """A critic that knows the mean, of a score that nobody can foresee."""
    return {"value/explained_variance_return": 0.02, "value/explained_variance": 0.3}


def bfloat16(iteration: int) -> Mapping[str, float]:
    noise = (iteration % 7) / 7
    return {
        "rollout/engine_gap_mean": 0.01 + 0.004 * noise,
        "rollout/engine_gap_max": 0.2 + 0.1 * noise,
        "policy/first_minibatch_ratio_max_dev": 0.0,
    }


def less_certain_slowly(iteration: int) -> Mapping[str, float]:
    return {"policy/entropy": 3.0 - 0.9 * min(1.0, iteration / 200)}


@pytest.mark.parametrize(
    "change",
    [better_and_longer, longer_for_nothing, kl_that_comes_to_rest, hard_to_foresee, bfloat16, less_certain_slowly],
)
def test_a_run_that_is_well_is_told_no_story(change: Change) -> None:
    assert stories_of(change, iterations=400) == []


def test_a_story_is_cleared_once_its_signs_are_gone() -> None:
    raised, cleared = stories_of(lambda iteration: fewer_rows(iteration) if iteration < 150 else {}, iterations=200)
    assert (raised["status"], cleared["status"]) == ("raised", "cleared")
    assert raised["id"] == cleared["id"]
    assert raised["action"] == "note"


def test_under_a_fault_of_the_program_no_development_is_told() -> None:
    stories = stories_of(lambda iteration: {**neighbours(iteration), **long_and_cut(iteration)})
    assert {each["rule"] for each in stories} == {"story:off_by_one"}


def test_stories_read_metrics_that_there_are() -> None:
    assert set(METRICS) >= READ_BY_STORIES
    made = set(healthy(1)) | {"policy/approx_kl/epoch_*", "policy/clip_fraction/epoch_*"}
    assert made >= READ_BY_STORIES
