"""A platform's own alert rules in a spec: they fill in what its `alerts` group leaves out, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ppo_core.registry import metric
from ppo_core.spec.loading import parse_alert_rules


class Filled(NamedTuple):
    """A raw spec with the rules in it, and the dotted names of the fields that came from them."""

    data: dict[str, Any]
    from_rules: tuple[str, ...]


def fill_alerts(data: Mapping[str, Any], rules: Mapping[str, Any]) -> Filled:
    """Raw spec `data` whose `alerts` takes what it does not set from `rules`, bands by metric.

    Whatever the spec says itself stays, null included: it has another value, or wants the default. A band of a whole
    family in the spec, such as `policy/approx_kl/epoch_*`, is a word about each of its metrics.

    Raises:
        SpecFaults: the rules are none of this version.
    """
    rules = parse_alert_rules(rules)
    own = data.get("alerts", {})
    own_bands = own.get("bands", {}) if isinstance(own, Mapping) else None
    if not isinstance(own_bands, Mapping):  # A fault of the spec, which the check that follows names.
        return Filled(dict(data), ())
    fields = {name: value for name, value in rules.items() if name not in own and name != "bands"}
    bands = {
        name: band
        for name, band in rules.get("bands", {}).items()
        if name not in own_bands and metric(name).name not in own_bands
    }
    names = (*(f"alerts.{name}" for name in fields), *(f"alerts.bands.{name}" for name in bands))
    if not names:
        return Filled(dict(data), ())
    return Filled({**data, "alerts": {**own, **fields, "bands": {**own_bands, **bands}}}, names)
