"""A roll back that changes what metrics measure: what was usual before says nothing of them, and is no alert."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ppo_core.diagnostics.alerts import Watch
from ppo_core.diagnostics.carried import watch_to_start_from
from ppo_core.main import run_segment
from ppo_core.rundir import ExitCode
from tests.ppo_core.diagnostics.made_runs import RAW, Change, alerts_of, healthy, made_spec, watch_of
from tests.ppo_core.toy_run import journal, make_toy, toy_segment

BEFORE = 60  # iterations until the roll back
SCORES = RAW["reward"]["sources"][0]


def longer(iteration: int) -> dict[str, float]:
    """Answers are twice as long; all else that is a sum over them is, too."""
    kl = 2 * (healthy(iteration)["kl/ref_sequence"] or 0.0)
    return {
        "response/length_mean": 60.0 + iteration % 3,
        "data/response_tokens": 64.0 * 60,
        "kl/ref_sequence": kl,
        "kl/ref_sequence_k3": kl,
        "reward/score_mean": 2.0,
    }


# By name: what the roll back changes, what the metrics are from then on, and an alert that this would be.
CASES: dict[str, tuple[dict[str, Any], Change, str]] = {
    "another engine": (
        {"rollout": {"engine": "vllm"}},
        lambda iteration: {"rollout/engine_gap_mean": 0.008, "rollout/engine_gap_max": 0.5},
        "story:weights_out_of_sync",
    ),
    "longer answers": ({"rollout": {"max_new_tokens": 128}}, longer, "band:response/length_mean"),
    "a lower temperature": (
        {"rollout": {"temperature": 0.5}},
        lambda iteration: {"policy/entropy": 1.3},
        "story:entropy_collapse",
    ),
    "ten times the reward": (
        {"reward": {"sources": [{**SCORES, "weight": 10.0}]}},
        lambda iteration: {"value/grad_norm": 5.0, "reward/score_mean": 10.0},
        "band:value/grad_norm",
    ),
    "another weight of the value loss": (
        {"update": {"value_coef": 10.0}},
        lambda iteration: {"value/grad_norm": 5.0},
        "band:value/grad_norm",
    ),
}


def rules_after(spec_state: dict[str, Any] | None, change: Change, groups: dict[str, Any]) -> set[str]:
    watch = Watch(made_spec(**groups), spec_state, lambda iteration: None)
    return {
        alert["rule"]
        for iteration in range(BEFORE + 1, BEFORE + 101)
        for alert in watch.look(iteration, {**healthy(iteration), **change(iteration)})
    }


def state_before() -> dict[str, Any]:
    watch = watch_of(made_spec())
    assert alerts_of(iterations=BEFORE, watch=watch) == []
    return watch.as_dict()


@pytest.mark.parametrize("case", CASES)
def test_what_a_roll_back_made_another_measure_is_learned_anew(case: str) -> None:
    groups, change, would_be = CASES[case]
    kept = state_before()
    assert would_be in rules_after(kept, change, groups)
    state, because = watch_to_start_from(kept, RAW, made_spec(**groups))
    assert because
    assert rules_after(state, change, groups) == set()


def test_after_it_has_learned_it_watches_as_before() -> None:
    groups = {"rollout": {"max_new_tokens": 128}}
    state, _ = watch_to_start_from(state_before(), RAW, made_spec(**groups))

    def longer_still(iteration: int) -> dict[str, float]:
        return {**longer(iteration), "response/length_mean": 61.0 if iteration <= BEFORE + 50 else 130.0}

    assert "band:response/length_mean" in rules_after(state, longer_still, groups)


@pytest.mark.parametrize(
    "groups",
    [
        {},
        {"alerts": {"on_story": "stop"}},
        {"gate": {"every": 7}},
        {"data": {**RAW["data"], "held_out": "held_out.jsonl", "seed": 5}},
    ],
)
def test_what_changes_no_metric_begins_nothing_anew(groups: dict[str, Any]) -> None:
    kept = state_before()
    assert watch_to_start_from(kept, RAW, made_spec(**groups)) == (kept, [])


def test_a_stronger_pull_keeps_all_but_the_gradients() -> None:
    kept = state_before()
    state, because = watch_to_start_from(kept, RAW, made_spec(kl={"coef": 0.5}))
    assert state is not None
    assert because == ["kl.coef"]
    for part in ("baseline", "history"):
        assert kept[part].keys() - state[part].keys() == {"policy/grad_norm", "value/grad_norm"}
        assert all(state[part][name] == kept[part][name] for name in state[part])


def test_an_open_alert_stays_open_until_its_signs_have_been_gone() -> None:
    watch = watch_of(made_spec())
    alerts = alerts_of(lambda i: {"response/length_mean": 90.0} if i > 40 else {}, iterations=BEFORE, watch=watch)
    assert {alert["rule"] for alert in alerts} == {"band:response/length_mean"}
    spec = made_spec(rollout={"max_new_tokens": 128})
    state, _ = watch_to_start_from(watch.as_dict(), RAW, spec)
    after = Watch(spec, state, lambda iteration: None)
    told = [
        (alert["status"], iteration)
        for iteration in range(BEFORE + 1, BEFORE + 40)
        for alert in after.look(iteration, {**healthy(iteration), "response/length_mean": 90.0 + iteration % 2})
    ]
    assert told == [("cleared", BEFORE + 10)]


def test_a_spec_of_another_version_says_nothing_of_what_was_usual() -> None:
    kept = state_before()
    state, because = watch_to_start_from(kept, {**RAW, "rollout": {"beams": 4}}, made_spec())
    assert (state or {})["baseline"] == {}
    assert because == ["rollout"]


def test_a_run_that_was_rolled_back_says_what_it_learns_anew(tmp_path: Path) -> None:
    spec = make_toy(tmp_path / "toy")
    spec |= {"iterations": 2, "checkpoints": {"every": 1}, "data": {**spec["data"], "held_out": None}}
    first = toy_segment(tmp_path, spec)
    assert run_segment(first, 1, 1) == ExitCode.DONE
    changed = {**spec, "rollout": {**spec["rollout"], "max_new_tokens": 12}}
    second = toy_segment(tmp_path, changed, number=2, checkpoint=str(first.checkpoint(1)))
    assert run_segment(second, 2, 1) == ExitCode.DONE
    (note,) = [event.payload["message"] for event in journal(second, "note") if "usual" in event.payload["message"]]
    assert note == "what is usual for this run is learned anew where it depends on rollout.max_new_tokens"
    again = toy_segment(tmp_path, spec, number=3, checkpoint=str(first.checkpoint(1)))
    assert run_segment(again, 3, 1) == ExitCode.DONE
    assert not [event for event in journal(again, "note") if "usual" in event.payload["message"]]
