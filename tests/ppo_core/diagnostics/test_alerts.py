"""The watch: raised once and cleared once, after a few iterations and not after one, and the same after a restart."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ppo_core.diagnostics.alerts import Payload, Watch
from ppo_core.registry import metric
from tests.ppo_core.diagnostics.made_runs import alerts_of, healthy, made_spec, watch_of

KEYS = {
    "id", "status", "rule", "kind", "severity", "metrics", "title", "detail", "meaning", "remedy", "iteration", "onset",
    "value", "baseline", "bound", "evidence", "snapshot", "action", "suggestion",
}  # fmt: skip


def long_between(first: int, last: int, factor: float = 1.7) -> Any:
    """Answers that are longer for a while."""
    return lambda iteration: {"response/length_mean": 30 * factor} if first <= iteration <= last else {}


def told(alerts: list[Payload]) -> list[tuple[str, str, str]]:
    return [(alert["rule"], alert["status"], alert["severity"]) for alert in alerts]


def test_a_healthy_run_is_left_alone() -> None:
    assert alerts_of(iterations=400) == []


def test_an_alert_is_raised_once_and_cleared_once() -> None:
    raised, cleared = alerts_of(long_between(120, 150))
    assert (raised["rule"], raised["kind"], raised["status"]) == ("band:response/length_mean", "band", "raised")
    assert (raised["iteration"], raised["onset"], raised["severity"]) == (123, 120, "warning")
    assert (raised["value"], raised["bound"]) == (pytest.approx(51.0), pytest.approx(1.5 * raised["baseline"]))
    assert raised["id"] == cleared["id"] == "al-band:response-length_mean-120-123"
    assert (cleared["status"], cleared["iteration"]) == ("cleared", 123)
    assert "until iteration 160" in cleared["detail"]
    for alert in (raised, cleared):
        assert set(alert) == KEYS
        json.dumps(alert, allow_nan=False)


def test_the_snapshot_is_of_the_metrics_around_the_moment() -> None:
    raised, _ = alerts_of(long_between(120, 150))
    assert set(raised["snapshot"]) == {
        "response/length_mean", "reward/score_mean", "kl/ref_sequence", "policy/entropy", "response/eos_rate",
    }  # fmt: skip
    points = raised["snapshot"]["response/length_mean"]
    assert [at for at, _ in points] == list(range(110, 124))
    assert points[-1] == [123, pytest.approx(51.0)]


@pytest.mark.parametrize("last", [120, 122])
def test_a_few_odd_iterations_raise_nothing(last: int) -> None:
    assert alerts_of(long_between(120, last)) == []


def test_a_short_way_back_clears_nothing() -> None:
    def change(iteration: int) -> dict[str, float]:
        return {} if iteration < 120 or 140 <= iteration < 148 else {"response/length_mean": 51.0}

    assert told(alerts_of(change)) == [("band:response/length_mean", "raised", "warning")]


def test_a_warning_that_turns_red_escalates_the_same_alert() -> None:
    def change(iteration: int) -> dict[str, float]:
        return {} if iteration < 120 else {"response/length_mean": 51.0 if iteration < 140 else 90.0}

    spec = made_spec(alerts={"on_critical": "stop"})
    raised, escalated = alerts_of(change, spec=spec)
    assert (raised["severity"], raised["action"]) == ("warning", "note")
    assert (escalated["status"], escalated["severity"], escalated["action"]) == ("escalated", "critical", "stop")
    assert all(escalated[key] == raised[key] for key in ("id", "iteration", "onset", "rule"))
    assert escalated["value"] == 90.0


def test_one_skipped_step_is_one_too_many() -> None:
    (raised, cleared) = alerts_of(lambda iteration: {"optimizer/skipped": float(iteration == 50)}, iterations=80)
    assert (raised["rule"], raised["iteration"]) == ("band:optimizer/skipped", 50)
    assert cleared["status"] == "cleared"


def test_a_number_that_is_none_is_red() -> None:
    alerts = alerts_of(lambda iteration: {"policy/approx_kl": float("nan")} if iteration > 60 else {}, iterations=70)
    (alert,) = alerts
    assert (alert["rule"], alert["severity"], alert["value"]) == ("band:policy/approx_kl", "critical", None)
    json.dumps(alert, allow_nan=False)


def test_what_the_spec_says_is_done() -> None:
    spec = made_spec(alerts={"on_warning": "pause"})
    assert alerts_of(long_between(120, 150), spec=spec)[0]["action"] == "pause"
    assert alerts_of(long_between(120, 150), spec=spec)[1]["action"] == "note"
    off = made_spec(alerts={"bands": {"response/length_mean": None}})
    assert alerts_of(long_between(120, 150), spec=off) == []
    stopping = made_spec(alerts={"on_story": "stop"})
    alerts = alerts_of(lambda iteration: {"rollout/rows_at_once": 32.0}, spec=stopping)
    assert [(alert["kind"], alert["action"]) for alert in alerts] == [("story", "stop")]


def test_a_shorter_baseline_is_learned_from_the_first_iterations_alone() -> None:
    """Answers that are short for 30 iterations: under 20 they are usual, of 100 they are the exception."""

    def change(iteration: int) -> dict[str, float]:
        return {"response/length_mean": 15.0} if iteration <= 30 else {}

    short = made_spec(alerts={"baseline_iterations": 20})
    assert told(alerts_of(change, spec=short))[0] == ("band:response/length_mean", "raised", "warning")
    raised = [alert["iteration"] for alert in alerts_of(change, iterations=150, spec=made_spec())]
    assert raised == [] or max(raised) < 70


def test_nothing_is_learned_while_the_critic_warms_up() -> None:
    spec = made_spec(update={"critic_warmup_iterations": 50}, alerts={"baseline_iterations": 20})

    def change(iteration: int) -> dict[str, float]:
        return {"policy/grad_norm": 0.001} if iteration <= 50 else {}

    assert alerts_of(change, spec=spec) == []


def test_a_restart_goes_on_as_if_it_had_not_been() -> None:
    """Through JSON after every iteration, as a checkpoint of each would have it."""
    spec, change = made_spec(), long_between(120, 150)
    straight, restarted = watch_of(spec), watch_of(spec)
    one, other = [], []
    for iteration in range(1, 180):
        metrics = {**healthy(iteration), **change(iteration)}
        one += straight.look(iteration, metrics)
        if iteration % 7 == 0:
            restarted = Watch(spec, json.loads(json.dumps(restarted.as_dict(), allow_nan=False)), lambda at: None)
        other += restarted.look(iteration, metrics)
    assert other == one
    assert len(one) == 2
    assert restarted.as_dict() == straight.as_dict()


def test_an_alert_of_a_band_that_is_switched_off_is_forgotten() -> None:
    watch = watch_of(made_spec())
    (raised,) = alerts_of(long_between(120, 400), iterations=130, watch=watch)
    assert watch.as_dict()["rules"][raised["rule"]]["open"]["id"] == raised["id"]
    off = made_spec(alerts={"bands": {"response/length_mean": None}})
    assert raised["rule"] not in Watch(off, watch.as_dict(), lambda at: None).as_dict()["rules"]


def test_an_alert_of_a_band_has_a_remedy_and_a_way_back_that_changes_no_setting() -> None:
    def before(iteration: int) -> tuple[str, int] | None:
        return ("1:100", 100) if iteration > 100 else None

    raised, cleared = alerts_of(long_between(120, 150), watch=watch_of(made_spec(), before))
    assert raised["remedy"] == metric("response/length_mean").remedy
    assert (raised["suggestion"]["checkpoint"], raised["suggestion"]["changes"]) == ("1:100", {})
    assert "began at iteration 120" in raised["suggestion"]["reason"]
    assert cleared["suggestion"] is None
    (early,) = alerts_of(long_between(60, 400), iterations=70, watch=watch_of(made_spec(), before))
    assert (early["onset"], early["suggestion"]) == (60, None), "no checkpoint is older"


def test_a_tripped_gate_is_an_alert_with_a_way_back_and_a_passed_one_clears_it() -> None:
    spec = made_spec(gate={"every": 50, "action": "pause"})
    watch = watch_of(spec, lambda iteration: ("1:40", 40) if iteration > 40 else None)
    assert watch.look_at_gate(50, False, "passed", 0.6) == []
    (raised,) = watch.look_at_gate(100, True, "The gate has tripped: because.", 0.3)
    assert (raised["rule"], raised["kind"], raised["severity"]) == ("gate:judge", "gate", "critical")
    assert (raised["onset"], raised["action"], raised["value"]) == (51, "pause", 0.3)
    assert raised["suggestion"]["checkpoint"] == "1:40"
    assert raised["suggestion"]["changes"] == {"kl.coef": 0.15}
    assert set(raised) == KEYS
    (again,) = watch.look_at_gate(150, True, "again", 0.2)
    assert (again["id"], again["iteration"], again["onset"]) == (raised["id"], 100, 51)
    assert (again["status"], again["action"], again["detail"], again["value"]) == ("escalated", "pause", "again", 0.2)
    assert again["suggestion"]["checkpoint"] == "1:40"
    (cleared,) = watch.look_at_gate(200, False, "passed", 0.7)
    assert (cleared["id"], cleared["status"]) == (raised["id"], "cleared")


def test_a_gate_that_only_notes_is_told_once() -> None:
    watch = watch_of(made_spec(gate={"every": 50, "action": "note"}))
    assert len(watch.look_at_gate(50, True, "tripped", 0.3)) == 1
    assert watch.look_at_gate(100, True, "again", 0.3) == []


def test_a_held_out_metric_with_a_band_is_watched_where_it_is_measured() -> None:
    watch = watch_of(made_spec(alerts={"bands": {"heldout/eos_rate": {"low": 0.9}}}))
    found = [
        alert
        for iteration in range(10, 80, 10)
        for alert in watch.look_at_evaluation(iteration, {"heldout/eos_rate": 0.5 if iteration > 20 else 0.95})
    ]
    assert [(alert["rule"], alert["iteration"], alert["onset"]) for alert in found] == [
        ("band:heldout/eos_rate", 60, 21)
    ]
