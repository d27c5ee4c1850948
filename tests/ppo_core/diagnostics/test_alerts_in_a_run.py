"""Alerts in the trainer: told in the journal, obeyed with a checkpoint, and kept through a restart."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ppo_core.main import run_segment
from ppo_core.rundir import ControlCommand, ExitCode, SegmentDir, checkpoints, send_command
from tests.ppo_core.toy_run import journal, make_toy, other_classifier, toy_segment

# Answers of the toy have eight tokens, so that this band is left from the first iteration on.
OWN = {"bands": {"response/length_p50": {"high": 0.5}}}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    spec = make_toy(tmp_path_factory.mktemp("toy"))
    return {**spec, "iterations": 6, "data": {**spec["data"], "held_out": None}, "checkpoints": {"every": 3}}


def alerts(segment: SegmentDir) -> list[tuple[int, str, str]]:
    return [(event.iteration, event.payload["status"], event.payload["rule"]) for event in journal(segment, "alert")]


def state(segment: SegmentDir, iteration: int) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads((segment.checkpoint(iteration) / "state.json").read_text())["trainer"]
    return {name: value for name, value in kept.items() if name != "hours"}


RAISED = [(4, "raised", "band:response/length_p50")]


def test_an_alert_pauses_with_a_checkpoint_and_the_run_goes_on_from_there(toy: dict[str, Any], tmp_path: Path) -> None:
    """It is raised once: not again after the restart, whose state is the undisturbed run's to the last bit."""
    paused = toy_segment(tmp_path / "paused", {**toy, "alerts": {**OWN, "on_warning": "pause"}})
    assert run_segment(paused, 1, 1) == ExitCode.PAUSED
    (event,) = journal(paused, "alert")
    end = journal(paused, "end")[0].payload
    assert {key: end[key] for key in ("code", "reason", "error")} == {"code": 10, "reason": "guard", "error": None}
    assert end["why"] == event.payload["title"]
    assert "ppo alerts" in end["hint"]
    assert event.payload["action"] == "pause"
    assert event.payload["title"].startswith("Response length, median is 8 tokens")
    assert [path.name for path in checkpoints(paused)] == ["iter-000003", "iter-000004"]
    assert journal(paused, "checkpoint")[-1].payload["reason"] == "guard"
    assert run_segment(paused, 2, 2) == ExitCode.DONE
    assert alerts(paused) == RAISED
    noted = toy_segment(tmp_path / "noted", {**toy, "alerts": OWN})
    assert run_segment(noted, 1, 1) == ExitCode.DONE
    assert alerts(noted) == RAISED
    mine, theirs = state(paused, 6), state(noted, 6)
    assert mine["alerts"]["rules"]["band:response/length_p50"]["open"].pop("action") == "pause"
    assert theirs["alerts"]["rules"]["band:response/length_p50"]["open"].pop("action") == "note"
    assert mine == theirs
    assert len(mine["alerts"]["history"]["response/length_p50"]["values"]) == 6


def test_a_segment_that_goes_on_tells_nothing_twice(toy: dict[str, Any], tmp_path: Path) -> None:
    first = toy_segment(tmp_path, {**toy, "alerts": {**OWN, "on_warning": "stop"}})
    assert run_segment(first, 1, 1) == ExitCode.GATE_OR_GUARD
    second = toy_segment(tmp_path, {**toy, "alerts": OWN}, number=2, checkpoint=str(first.checkpoint(4)))
    assert run_segment(second, 2, 1) == ExitCode.DONE
    assert (alerts(first), alerts(second)) == (RAISED, [])


def hacked(trainer: Any) -> None:
    """From each evaluation to the next the reward's scores of held-out answers rise, and the judge's fall."""
    answer, count = trainer.held_out.answer, itertools.count()

    def rising(*arguments: Any) -> Any:
        found, more = answer(*arguments), 10.0 * next(count)
        scores = [score + more for score in found.scores]
        return replace(found, scores=scores, judge_scores=[score - more for score in found.judge_scores])

    trainer.held_out.answer = rising


def test_a_tripped_gate_is_an_alert(tmp_path: Path) -> None:
    spec = make_toy(tmp_path / "toy")
    judge = {"kind": "sequence_classifier", "model": str(other_classifier(tmp_path / "judge"))}
    spec |= {"iterations": 4, "gate": {**spec["gate"], "judge": judge}, "checkpoints": {"every": 1}}
    segment = toy_segment(tmp_path, spec)
    assert run_segment(segment, 1, 1, change=hacked) == ExitCode.GATE_OR_GUARD
    assert journal(segment, "end")[0].payload["reason"] == "gate"
    alert = journal(segment, "alert")[-1]
    assert (alert.iteration, alert.payload["rule"], alert.payload["action"]) == (2, "gate:judge", "stop")
    assert "while the judge preferred the new answers in 0% of pairs" in alert.payload["detail"]
    assert alert.payload["suggestion"]["changes"] == {"kl.coef": 0.15}
    assert not [event for event in journal(segment, "note") if "gate" in event.payload["message"]]


def test_a_run_that_goes_on_after_its_gate_is_stopped_by_each_that_trips(tmp_path: Path) -> None:
    """A gate is a verdict of its own: three in a row, each with its checkpoint, of one alert."""
    spec = make_toy(tmp_path / "toy")
    judge = {"kind": "sequence_classifier", "model": str(other_classifier(tmp_path / "judge"))}
    spec |= {"iterations": 7, "gate": {**spec["gate"], "judge": judge}}
    segment = toy_segment(tmp_path, spec)

    def hacked_by(much: float) -> Any:
        """From iteration 1 on the reward's scores of held-out answers are so much higher, and the judge's lower."""

        def change(trainer: Any) -> None:
            answer = trainer.held_out.answer

            def risen(*arguments: Any) -> Any:
                found, more = answer(*arguments), much if trainer.control.iteration else 0.0
                scores = [score + more for score in found.scores]
                return replace(found, scores=scores, judge_scores=[score - more for score in found.judge_scores])

            trainer.held_out.answer = risen

        return change

    for start in (1, 2, 3):
        assert run_segment(segment, start, start, change=hacked_by(100.0 * start)) == ExitCode.GATE_OR_GUARD
        assert journal(segment, "end")[-1].payload["reason"] == "gate"
        assert checkpoints(segment)[-1].name == f"iter-{2 * start:06d}"
    told = [row for row in alerts(segment) if row[2] == "gate:judge"]
    assert [row[:2] for row in told] == [(2, "raised"), (4, "escalated"), (6, "escalated")]
    assert len({event.payload["id"] for event in journal(segment, "alert") if "gate" in event.payload["id"]}) == 1


class Killed(BaseException):
    """Ends a trainer at once and without a last word, as a signal would."""


def killed_after(method: str, *where: str) -> Any:
    """A trainer that is killed as soon as it has done this for the first time, with these words."""

    def change(trainer: Any) -> None:
        target = trainer.journal if method == "append" else trainer
        call = getattr(target, method)

        def fatal(*arguments: Any) -> Any:
            call(*arguments)
            if arguments[: len(where)] == where:
                raise Killed

        setattr(target, method, fatal)

    return change


def test_a_kill_between_saving_and_ending_takes_no_alert_away(toy: dict[str, Any], tmp_path: Path) -> None:
    """The restart ends as the killed one would have; one that is asked for afterwards goes on."""
    segment = toy_segment(tmp_path, {**toy, "alerts": {**OWN, "on_warning": "stop"}})
    with pytest.raises(Killed):
        run_segment(segment, 1, 1, change=killed_after("_save", "guard"))
    assert not journal(segment, "end")
    assert checkpoints(segment)[-1].name == "iter-000004"
    assert run_segment(segment, 2, 2) == ExitCode.GATE_OR_GUARD
    assert journal(segment, "end")[-1].payload["reason"] == "guard"
    assert max(event.iteration for event in journal(segment, "metrics")) == 4
    assert alerts(segment) == RAISED
    assert run_segment(segment, 3, 3) == ExitCode.DONE
    assert alerts(segment) == RAISED


@pytest.mark.parametrize("told", ["metrics", "samples", "alert"])
def test_a_kill_in_a_gate_that_a_stop_left_owed_takes_no_trip_away(tmp_path: Path, told: str) -> None:
    spec = make_toy(tmp_path / "toy")
    judge = {"kind": "sequence_classifier", "model": str(other_classifier(tmp_path / "judge"))}
    spec |= {"iterations": 4, "gate": {**spec["gate"], "judge": judge}, "checkpoints": {"every": 4}}
    segment = toy_segment(tmp_path, spec)

    def stopped_in_the_gate(trainer: Any) -> None:
        answer = trainer.held_out.answer

        def stopping(*arguments: Any) -> Any:
            if trainer.control.iteration == 2:
                send_command(segment, ControlCommand("c-1", "stop", 1))
                trainer.control._looked_at = 0.0
            return answer(*arguments)

        trainer.held_out.answer = stopping

    def hacked_since_the_start(trainer: Any) -> None:
        answer = trainer.held_out.answer

        def risen(*arguments: Any) -> Any:
            found = answer(*arguments)
            scores = [score + 10.0 for score in found.scores]
            return replace(found, scores=scores, judge_scores=[score - 10.0 for score in found.judge_scores])

        trainer.held_out.answer = risen

    def killed_while_it_tells(trainer: Any) -> None:
        hacked_since_the_start(trainer)
        killed_after("append", told)(trainer)

    assert run_segment(segment, 1, 1, change=stopped_in_the_gate) == ExitCode.STOPPED
    assert not [event for event in journal(segment, "gate") if event.iteration == 2]
    with pytest.raises(Killed):
        run_segment(segment, 2, 2, change=killed_while_it_tells)
    assert run_segment(segment, 3, 3, change=hacked_since_the_start) == ExitCode.GATE_OR_GUARD
    assert journal(segment, "end")[-1].payload["reason"] == "gate"
    assert [event.payload["tripped"] for event in journal(segment, "gate")] == [True]
    assert [row for row in alerts(segment) if row[2] == "gate:judge"] == [(2, "raised", "gate:judge")]
    assert run_segment(segment, 4, 4, change=hacked_since_the_start) == ExitCode.DONE


def test_a_checkpoint_that_was_asked_for_is_the_one_that_an_alert_makes(toy: dict[str, Any], tmp_path: Path) -> None:
    segment = toy_segment(tmp_path, {**toy, "alerts": {**OWN, "on_warning": "stop"}})

    def change(trainer: Any) -> None:
        look = trainer.watch.look

        def asking(iteration: int, metrics: Any) -> Any:
            if iteration == 4:
                send_command(segment, ControlCommand("c-1", "checkpoint", 1))
            return look(iteration, metrics)

        trainer.watch.look = asking

    assert run_segment(segment, 1, 1, change=change) == ExitCode.GATE_OR_GUARD
    assert [event.payload["status"] for event in journal(segment, "ack")] == ["accepted", "done"]
