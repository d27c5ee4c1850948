"""The watch over a run: which alerts are raised, rise, and are cleared, iteration by iteration.

An alert is raised once and cleared once. Single values prove nothing: a band or a story has to be left, or found, in
most of the last few iterations, and a raised alert goes only after a quiet stretch. All of it is made of the metrics
that the journal holds and of the state that checkpoints keep, so a restart goes on as if it had not been.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from ppo_core.diagnostics.bands import Finding, band_of, finding, watched_bands
from ppo_core.diagnostics.baseline import Baseline, baseline_iterations
from ppo_core.diagnostics.history import History, onset
from ppo_core.diagnostics.remedies import changes_for
from ppo_core.diagnostics.signs import Reading, Sign
from ppo_core.diagnostics.stories import READ_BY_STORIES, STORIES, Found, look_for_stories
from ppo_core.registry import Band, metric
from ppo_core.spec import RunSpec
from ppo_core.spec.watching import Action

# To raise: so many of the last so many. To clear: so many healthy ones without an exception.
RAISE = (4, 5)
CLEAR = 10
# Iterations before the onset that a snapshot begins with.
LEAD = 10
HEADLINE = ("reward/score_mean", "kl/ref_sequence", "policy/entropy", "response/length_mean", "response/eos_rate")
GATE = "gate:judge"

Payload = dict[str, Any]
Severity = Literal["warning", "critical"]
#: The newest checkpoint made before an iteration: its name (`segment:iteration`) and its iteration.
CheckpointBefore = Callable[[int], tuple[str, int] | None]


class Watch:
    """What is watched, with all that it remembers."""

    def __init__(
        self,
        spec: RunSpec,
        state: Mapping[str, Any] | None,
        checkpoint_before: CheckpointBefore,
        context: int | None = None,
    ) -> None:
        """`context` is how many positions the policy has, where that is known: what is proposed stays within it."""
        self.spec = spec
        self._context = context
        self._checkpoint_before = checkpoint_before
        self._bands = watched_bands(spec.alerts.bands)
        state = state or {"baseline": {}, "history": {}, "rules": {}}
        num = baseline_iterations(spec.iterations, spec.alerts.baseline_iterations)
        self._baseline = Baseline.of(num, state["baseline"])
        self._history = History.of(state["history"])
        self._rules: dict[str, dict[str, Any]] = {
            rule: {"levels": list(kept["levels"]), "open": kept["open"] and dict(kept["open"])}
            for rule, kept in state["rules"].items()
            if self._is_watched(rule)
        }

    def as_dict(self) -> dict[str, Any]:
        """All that it remembers, as plain data."""
        return {
            "baseline": self._baseline.as_dict(),
            "history": self._history.as_dict(),
            "rules": {
                rule: {"levels": list(kept["levels"]), "open": kept["open"] and dict(kept["open"])}
                for rule, kept in self._rules.items()
            },
        }

    def look(self, iteration: int, metrics: Mapping[str, float | None]) -> list[Payload]:
        """Take in the metrics of an iteration and say what they give rise to: payloads of `alert` events, in order."""
        learns = iteration > self.spec.update.critic_warmup_iterations
        for name, value in metrics.items():
            if value is not None and math.isfinite(value) and self._is_kept(name):
                self._history.add(iteration, name, value)
                if learns:
                    self._baseline.learn(name, value)
        return [*self._stories(iteration), *self._left_bands(iteration, metrics)]

    def look_at_evaluation(self, iteration: int, metrics: Mapping[str, float | None]) -> list[Payload]:
        """The same for held-out metrics, which come at some iterations, and may come after a restart."""
        for name, value in metrics.items():
            if value is not None and math.isfinite(value) and band_of(name, self._bands) is not None:
                self._history.add(iteration, name, value)
                self._baseline.learn(name, value)
        return list(self._left_bands(iteration, metrics))

    def look_at_gate(self, iteration: int, tripped: bool, explanation: str, win_rate: float | None) -> list[Payload]:
        """What a gate gives rise to: it trips, or an earlier one's alert is cleared.

        Each gate is a verdict of its own: one that trips while the alert of an earlier one is open acts again.
        """
        kept = self._rules.setdefault(GATE, {"levels": [], "open": None})
        if not tripped:
            return [self._cleared(kept, iteration, "the gate has been passed since", win_rate)] if kept["open"] else []
        if kept["open"] and self.spec.gate.action == "note":
            return []
        main = metric("judge/win_rate")
        sign = Sign("judge/win_rate", 0.5, win_rate, explanation)
        since = kept["open"]["onset"] if kept["open"] else max(1, iteration - self.spec.gate.every + 1)
        payload = self._payload(GATE, "gate", "critical", iteration, since, (sign,), self.spec.gate.action)
        payload |= {
            "title": "The judge gate has tripped: the training score rose, the judge saw no gain",
            "detail": explanation,
            "meaning": main.meaning,
            "remedy": main.remedy,
            "metrics": ["judge/win_rate", "reward/score_mean", "judge/score_mean"],
            "value": win_rate,
            "baseline": 0.5,
            "bound": 0.5,
        }
        if kept["open"]:
            payload |= {"status": "escalated", "id": kept["open"]["id"], "iteration": kept["open"]["iteration"]}
        return [self._raised(kept, payload)]

    # Bands

    def _left_bands(self, iteration: int, metrics: Mapping[str, float | None]) -> Iterable[Payload]:
        for name, value in metrics.items():
            band = band_of(name, self._bands) if value is not None else None
            if band is not None and value is not None:
                finite = math.isfinite(value)
                found = finding(name, band, self._history, self._baseline) if finite else Finding(2, None)
                yield from self._band(iteration, name, band, found)

    def _band(self, iteration: int, name: str, band: Band, found: Finding) -> Iterable[Payload]:
        kept = self._rules.setdefault(f"band:{name}", {"levels": [], "open": None})
        severity = _severity(kept, found.level, at_once=_is_count(band))
        if kept["open"] is None and severity is not None:
            yield self._raised(kept, self._of_band(iteration, name, band, found, severity))
        elif kept["open"] and severity == "critical" and kept["open"]["severity"] == "warning":
            now = self._of_band(iteration, name, band, found, severity)
            same = {key: kept["open"][key] for key in ("id", "iteration", "onset")}
            yield self._raised(kept, {**now, **same, "status": "escalated"})
        elif kept["open"] and severity is None and _is_quiet(kept):
            yield self._cleared(kept, iteration, "it has been back in its band", found.value)

    def _of_band(self, iteration: int, name: str, band: Band, found: Finding, severity: Severity) -> Payload:
        entry, alerts = metric(name), self.spec.alerts
        since = iteration
        if found.value is not None:
            then = found.baseline
            if then is None:
                start = self._baseline.start(name)
                then = start.median if start is not None and found.level else found.bound
            if then is not None:
                since = onset(self._history.smoothed(name), then, found.value, found.noise)
        against = ""
        if found.baseline is not None:
            word = "usual is" if band.relative_to == "baseline" else "40 iterations before it counted as"
            against = f"; {word} {found.baseline:.4g}"
        bound = f"beyond {found.bound:.4g}{against}" if found.bound is not None else "out of its band"
        value = "not a finite number" if found.value is None else entry.with_unit(f"{found.value:.4g}")
        text = f"{entry.title} is {value}" + (f", {bound}" if found.value is not None else "")
        sign = Sign(name, found.baseline, found.value, text, since)
        action = alerts.on_critical if severity == "critical" else alerts.on_warning
        payload = self._payload(f"band:{name}", "band", severity, iteration, since, (sign,), action)
        return payload | {
            "title": text,
            "detail": f"{name} was {value} at iteration {iteration} and has been on its way "
            f"since iteration {since}. Healthy: {band.text}",
            "meaning": entry.meaning,
            "remedy": entry.remedy,
            "value": found.value,
            "baseline": found.baseline,
            "bound": found.bound,
        }

    # Stories

    def _stories(self, iteration: int) -> Iterable[Payload]:
        there = {
            f.story.name: f for f in look_for_stories(Reading(self.spec, iteration, self._history, self._baseline))
        }
        for name in STORIES:
            kept = self._rules.setdefault(f"story:{name}", {"levels": [], "open": None})
            found = there.get(name)
            severity = _severity(kept, 2 if found else 0)
            if kept["open"] is None and found is not None and severity is not None:
                yield self._raised(kept, self._of_story(iteration, found))
            elif kept["open"] and _is_quiet(kept):
                yield self._cleared(kept, iteration, "its signs have been gone", None)

    def _of_story(self, iteration: int, found: Found) -> Payload:
        story, main = found.story, found.signs[0]
        since = found.onset if found.onset is not None else iteration
        payload = self._payload(
            f"story:{story.name}", "story", story.severity, iteration, since, found.signs, self.spec.alerts.on_story
        )
        return payload | {
            "title": f"{story.title}: {main.text}",
            "detail": ". ".join(sign.text[:1].upper() + sign.text[1:] for sign in found.signs) + ".",
            "meaning": story.meaning,
            "remedy": story.remedy,
            "value": main.now,
            "baseline": main.then,
            "bound": None,
        }

    # Alerts of every kind

    def _payload(
        self,
        rule: str,
        kind: Literal["band", "story", "gate"],
        severity: Severity,
        iteration: int,
        since: int,
        signs: tuple[Sign, ...],
        action: Action,
    ) -> Payload:
        names = [sign.metric for sign in signs]
        return {
            "id": f"al-{rule.replace('/', '-')}-{since}-{iteration}",
            "status": "raised",
            "rule": rule,
            "kind": kind,
            "severity": severity,
            "metrics": names,
            "iteration": iteration,
            "onset": since,
            "evidence": [sign.as_dict() for sign in signs],
            "snapshot": self._history.snapshot([*names, *HEADLINE], since - LEAD),
            "action": action,
            "suggestion": self._suggestion(rule, names, since),
        }

    def _suggestion(self, rule: str, metrics: list[str], since: int) -> Payload | None:
        """Where to go back to and with what; None where neither is known.

        A band names a metric, not a cause, so it changes no setting: its remedy says what to look at.
        """
        before = self._checkpoint_before(since)
        kind, name = rule.split(":", 1)
        what = {"band": f"what {name} shows", "story": name.replace("_", " "), "gate": "what the judge gate saw"}[kind]
        story = name if kind == "story" else rule
        changes = changes_for(story, self.spec, set(metrics), before[1] if before else 0, self._context)
        if before is None and not changes:
            return None
        reason = f"{what} began at iteration {since}" + (
            f"; {before[0]} is the newest checkpoint before that" if before is not None else "; no checkpoint is older"
        )
        if kind == "band":
            reason += "; with nothing changed the run repeats itself"
        return {"checkpoint": before[0] if before is not None else None, "changes": changes, "reason": reason}

    def _raised(self, kept: dict[str, Any], payload: Payload) -> Payload:
        # What can be found again stays out of checkpoints; which of them are there is no part of the run's state.
        kept["open"] = {key: value for key, value in payload.items() if key not in ("snapshot", "suggestion")}
        return payload

    def _cleared(self, kept: dict[str, Any], iteration: int, why: str, value: float | None) -> Payload:
        was, kept["open"] = kept["open"], None
        snapshot = self._history.snapshot([*was["metrics"], *HEADLINE], iteration - LEAD)
        detail = f"Raised at iteration {was['iteration']}; {why}, until iteration {iteration}."
        closing = {"status": "cleared", "detail": detail, "value": value, "snapshot": snapshot}
        return {**was, **closing, "action": "note", "suggestion": None}

    def _is_kept(self, name: str) -> bool:
        return name in READ_BY_STORIES or metric(name).name in READ_BY_STORIES or band_of(name, self._bands) is not None

    def _is_watched(self, rule: str) -> bool:
        kind, name = rule.split(":", 1)
        return kind == "gate" or (name in STORIES if kind == "story" else band_of(name, self._bands) is not None)


def _is_count(band: Band) -> bool:
    """A band of none at all: one is one too many."""
    return band.measure == "value" and band.high == 0 and band.low is None


def _severity(kept: dict[str, Any], level: int, at_once: bool = False) -> Severity | None:
    """Note one more level; what the last ones amount to."""
    levels = [*kept["levels"], level][-CLEAR:]
    kept["levels"] = levels
    needed, among = (1, 1) if at_once else RAISE
    if sum(each == 2 for each in levels[-among:]) >= needed:
        return "critical"
    return "warning" if sum(each >= 1 for each in levels[-among:]) >= needed else None


def _is_quiet(kept: dict[str, Any]) -> bool:
    return len(kept["levels"]) == CLEAR and not any(kept["levels"])
