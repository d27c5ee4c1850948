"""A platform's alert rules fill in what a spec's `alerts` leaves out; what the spec says itself always stays."""

from __future__ import annotations

from typing import Any

import pytest

from ppo_core.spec import SpecFaults, fill_alerts, parse_alert_rules, parse_spec
from tests.ppo_core.spec.test_loading import BASE

LENGTH = "response/length_mean"
KL = "policy/approx_kl"


def alerts_of(own: Any, rules: dict[str, Any]) -> Any:
    data = BASE if own is None else {**BASE, "alerts": own}
    return fill_alerts(data, rules).data.get("alerts")


def test_what_is_left_out_is_filled_and_named() -> None:
    filled = fill_alerts(BASE, {"on_critical": "pause", "bands": {LENGTH: {"high": 2}, KL: None}})
    alerts = parse_spec(filled.data).alerts
    assert (alerts.on_critical, alerts.on_warning, alerts.bands[KL]) == ("pause", "note", None)
    assert alerts.bands[LENGTH] is not None
    assert alerts.bands[LENGTH].high == 2.0
    assert filled.from_rules == ("alerts.on_critical", f"alerts.bands.{LENGTH}", f"alerts.bands.{KL}")


@pytest.mark.parametrize(
    ("own", "rules"),
    [
        ({"on_critical": "note"}, {"on_critical": "pause"}),  # the default, said aloud
        ({"baseline_iterations": None}, {"baseline_iterations": 50}),
        ({"bands": {LENGTH: {"high": 3}}}, {"bands": {LENGTH: {"low": 1, "high": 2}}}),  # whole, not bound by bound
        ({"bands": {LENGTH: None}}, {"bands": {LENGTH: {"high": 2}}}),
        ({"bands": {LENGTH: {"high": 3}}}, {"bands": {LENGTH: None}}),
        ({"bands": {f"{KL}/epoch_*": None}}, {"bands": {f"{KL}/epoch_3": {"high": 2}}}),  # a word about the family
    ],
)
def test_what_the_spec_says_stays(own: dict[str, Any], rules: dict[str, Any]) -> None:
    filled = fill_alerts({**BASE, "alerts": own}, rules)
    assert (filled.data["alerts"], filled.from_rules) == (own, ())


def test_bands_are_filled_by_metric() -> None:
    own = {"bands": {LENGTH: {"high": 3}}}
    assert alerts_of(own, {"bands": {LENGTH: None, KL: {"high": 1}}}) == {
        "bands": {LENGTH: {"high": 3}, KL: {"high": 1.0}}
    }
    assert own == {"bands": {LENGTH: {"high": 3}}}


@pytest.mark.parametrize("own", [5, [], {"bands": 5}, {"bands": None}, "x"])
def test_a_malformed_group_stays_for_the_check_to_name(own: Any) -> None:
    assert alerts_of(own, {"on_critical": "pause", "bands": {KL: None}}) == own


def test_without_rules_nothing_changes() -> None:
    assert fill_alerts(BASE, {}) == (BASE, ())


def test_only_what_is_set_is_kept() -> None:
    assert parse_alert_rules({"bands": {LENGTH: {"high": 2}}}) == {"bands": {LENGTH: {"high": 2.0}}}
    assert parse_alert_rules({"baseline_iterations": None}) == {"baseline_iterations": None}


@pytest.mark.parametrize(
    ("rules", "pointer", "words"),
    [
        ({"bands": {"response/length": None}}, "/alerts/bands/response~1length", "did you mean"),
        ({"bands": {KL: {"low": 2, "high": 1}}}, "/alerts/bands/policy~1approx_kl/high", "high is 1 but low is 2"),
        ({"bands": {KL: {}}}, "/alerts/bands/policy~1approx_kl", "null to switch the metric off"),
        ({"on_red": "stop"}, "/alerts/on_red", "unknown field"),
        ({"on_critical": "explode"}, "/alerts/on_critical", "'explode'"),
        ({"baseline_iterations": 3}, "/alerts/baseline_iterations", "3"),
        ({"bands": {KL: {"high": float("nan")}}}, "/alerts/bands/policy~1approx_kl/high", "nan"),
    ],
)
def test_faults_are_those_of_a_spec(rules: dict[str, Any], pointer: str, words: str) -> None:
    with pytest.raises(SpecFaults) as caught:
        parse_alert_rules(rules)
    (fault,) = caught.value.faults
    assert (fault.pointer, caught.value.heading) == (pointer, "The platform's alert rules have 1 fault.")
    assert words in fault.message
    with pytest.raises(SpecFaults) as of_spec:
        parse_spec({**BASE, "alerts": rules})
    assert of_spec.value.faults == caught.value.faults
