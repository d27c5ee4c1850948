"""Gates of whole runs with a served judge: told, resumed, rolled back to, and by judges that are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ppo_core.main import run_segment
from ppo_core.rundir import ControlCommand, ExitCode, SegmentDir, send_command
from ppo_core.spec.scorers import JUDGE_FUNCTIONS, REWARD_FUNCTIONS
from tests.ppo_core.scoring.chat_service import completion, preferring
from tests.ppo_core.scoring.live_service import Said, Service, live_service
from tests.ppo_core.scoring.registered import FUNCTIONS, register
from tests.ppo_core.test_carried_state import state_of
from tests.ppo_core.toy_run import journal, make_toy, toy_segment

pytestmark = pytest.mark.runs


class Model:
    """A served model whose answers a test may change while it runs."""

    def __init__(self) -> None:
        self.answer: Callable[[dict[str, Any]], Said] = preferring(len)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    toy = make_toy(tmp_path_factory.mktemp("toy"))
    toy["update"]["learning_rate"] = 1e-2  # answers that differ from gate to gate
    toy["rollout"]["stop_ids"] = list(range(10, 50))
    return {**toy, "iterations": 4, "checkpoints": {"every": 1, "keep_last": -1}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Model, Service]]:
    model = Model()
    with pytest.MonkeyPatch.context() as patch, live_service(lambda request: model.answer(request)) as service:
        patch.setenv("PPO_REWARD_HOSTS", "127.0.0.1")
        yield model, service


@pytest.fixture
def model(served: tuple[Model, Service]) -> Model:
    served[0].answer = preferring(len)
    return served[0]


def judged_by(toy: dict[str, Any], service: Service, name: str = "longer", **gate: Any) -> dict[str, Any]:
    judge = {"kind": "openai", "url": f"http://127.0.0.1:{service.port}/v1", "served_model": name}
    return {**toy, "gate": {"every": 2, "prompts": 6, "judge": judge, "action": "note", **gate}}


@pytest.fixture(scope="module")
def straight(
    toy: dict[str, Any], served: tuple[Model, Service], tmp_path_factory: pytest.TempPathFactory
) -> SegmentDir:
    segment = toy_segment(tmp_path_factory.mktemp("run"), judged_by(toy, served[1]))
    assert run_segment(segment, token=0, attempt=1) == ExitCode.DONE
    return segment


def gates(segment: SegmentDir) -> dict[int, dict[str, Any]]:
    events = journal(segment, "gate")
    assert len({event.iteration for event in events}) == len(events)
    return {event.iteration: event.payload for event in events}


def test_every_gate_is_told_with_its_evidence(straight: SegmentDir) -> None:
    told = gates(straight)
    assert sorted(told) == [2, 4]
    for payload in told.values():
        for against in (payload["against_last"], payload["against_start"]):
            assert against["wins"] + against["ties"] + against["losses"] == 6
            assert against["low"] < against["rate"] < against["high"]
            assert (against["swayed"], against["unreadable"]) == (0, 0)
    assert told[2]["against_last"] == told[2]["against_start"]
    assert told[2]["against_start"]["asked"] > 0
    metrics = {event.iteration: event.payload for event in journal(straight, "metrics")}
    for iteration, payload in told.items():
        assert metrics[iteration]["judge/win_rate"] == payload["against_last"]["rate"]
        assert metrics[iteration]["judge/win_rate_vs_start_high"] == payload["against_start"]["high"]
        assert "judge/score_mean" not in metrics[iteration]


def test_the_answers_of_a_gate_are_kept_with_what_the_judge_said(straight: SegmentDir) -> None:
    lines = (straight.samples / "iter-000004-held_out.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for name in ("against_last", "against_start"):
        said = [record[f"judge_{name}"] for record in records]
        gate = gates(straight)[4][name]
        assert (said.count(1.0), said.count(0.0), said.count(-1.0)) == (gate["wins"], gate["ties"], gate["losses"])
    for record in records:
        assert record["judge_score"] is None
        assert len(record["tokens"]["texts"]) == len(record["tokens"]["ids"]) == record["length"]


def test_the_score_of_a_checkpoint_is_how_often_it_wins_over_the_start(straight: SegmentDir) -> None:
    told = {event.iteration: event.payload["judge_score"] for event in journal(straight, "checkpoint")}
    assert told == {
        1: None,
        2: gates(straight)[2]["against_start"]["rate"],
        3: None,
        4: gates(straight)[4]["against_start"]["rate"],
    }


def test_a_run_made_twice_holds_the_same_gates(
    toy: dict[str, Any], served: tuple[Model, Service], model: Model, straight: SegmentDir, tmp_path: Path
) -> None:
    segment = toy_segment(tmp_path, judged_by(toy, served[1]))
    assert run_segment(segment, token=0, attempt=1) == ExitCode.DONE
    assert gates(segment) == gates(straight)


def test_a_stop_in_a_comparison_leaves_the_gate_to_the_next_start(
    toy: dict[str, Any], served: tuple[Model, Service], model: Model, straight: SegmentDir, tmp_path: Path
) -> None:
    segment = toy_segment(tmp_path, judged_by(toy, served[1]))

    def stopping(request: dict[str, Any]) -> Said:
        send_command(segment, ControlCommand("c-1", "stop", 1))
        return Said(hangs=True)

    model.answer = stopping
    assert run_segment(segment, token=1, attempt=1) == ExitCode.STOPPED
    assert gates(segment) == {}
    assert state_of(segment.checkpoint(2))["evaluation_owed"]
    model.answer = preferring(len)
    assert run_segment(segment, token=2, attempt=2) == ExitCode.DONE
    assert gates(segment) == gates(straight)
    assert state_of(segment.checkpoint(4))["gate"] == state_of(straight.checkpoint(4))["gate"]


@pytest.mark.parametrize("iteration", [1, 2, 3])
def test_a_roll_back_holds_the_gates_of_what_it_left(
    toy: dict[str, Any],
    served: tuple[Model, Service],
    model: Model,
    straight: SegmentDir,
    tmp_path: Path,
    iteration: int,
) -> None:
    """With nothing changed: before, at and after a gate."""
    start = str(straight.checkpoint(iteration))
    segment = toy_segment(tmp_path, judged_by(toy, served[1]), number=2, checkpoint=start)
    assert run_segment(segment, token=3, attempt=1) == ExitCode.DONE
    assert gates(segment) == {at: gate for at, gate in gates(straight).items() if at > iteration}
    assert state_of(segment.checkpoint(4))["gate"] == state_of(straight.checkpoint(4))["gate"]


def by_name(request: dict[str, Any]) -> Said:
    sign = -1 if request["model"] == "shorter" else 1
    return preferring(lambda text: sign * len(text))(request)


def test_a_roll_back_to_another_judge_compares_the_kept_answers(
    toy: dict[str, Any], served: tuple[Model, Service], model: Model, straight: SegmentDir, tmp_path: Path
) -> None:
    """As a run that had this judge all along."""
    model.answer = by_name
    spec = judged_by(toy, served[1], "shorter")
    segment = toy_segment(tmp_path / "back", spec, number=2, checkpoint=str(straight.checkpoint(3)))
    assert run_segment(segment, token=3, attempt=1) == ExitCode.DONE
    along = toy_segment(tmp_path / "along", spec)
    assert run_segment(along, token=3, attempt=1) == ExitCode.DONE
    assert gates(segment) == {4: gates(along)[4]}
    (wins, losses), (other_wins, other_losses) = (
        (gate["against_start"]["wins"], gate["against_start"]["losses"])
        for gate in (gates(segment)[4], gates(straight)[4])
    )
    assert (wins, losses) == (other_losses, other_wins)
    assert wins != losses


def test_a_judge_that_prefers_a_place_sees_ties_and_is_told_of_in_preflight(
    toy: dict[str, Any], served: tuple[Model, Service], model: Model, tmp_path: Path
) -> None:
    model.answer = lambda request: completion("first")
    segment = toy_segment(tmp_path, {**judged_by(toy, served[1]), "iterations": 2, "preflight": {"audit_answers": 0}})
    assert run_segment(segment, token=0, attempt=1) == ExitCode.DONE
    against = gates(segment)[2]["against_start"]
    assert (against["rate"], against["ties"], against["swayed"]) == (0.5, 6, against["asked"])
    assert against["asked"] > 0
    found = {each["check"]: each for each in journal(segment, "preflight")[0].payload["findings"]}
    assert found["judge"]["status"] == "warning"
    assert "preferred the same place" in found["judge"]["detail"]


def test_preflight_finds_a_judge_that_says_nothing_and_too_few_prompts(
    toy: dict[str, Any], served: tuple[Model, Service], model: Model, tmp_path: Path
) -> None:
    model.answer = lambda request: completion("I cannot say")
    spec = {**judged_by(toy, served[1], prompts=128), "iterations": 1, "preflight": {"audit_answers": 0}}
    segment = toy_segment(tmp_path, spec)
    assert run_segment(segment, token=0, attempt=1) == ExitCode.DONE
    found = {each["check"]: each for each in journal(segment, "preflight")[0].payload["findings"]}
    assert found["judge"]["status"] == "failed"
    assert "the judge said 'I cannot say'" in found["judge"]["detail"]
    assert "gate.judge.answer_tokens" in found["judge"]["remedy"]
    assert found["gate_prompts"]["status"] == "warning"
    assert "has 6 prompts that fit, and gate.prompts asks for 128" in found["gate_prompts"]["detail"]


def test_a_judge_that_stays_away_ends_the_run_with_the_reason(
    toy: dict[str, Any], served: tuple[Model, Service], model: Model, tmp_path: Path
) -> None:
    model.answer = lambda request: Said(status=404)
    segment = toy_segment(tmp_path, judged_by(toy, served[1]))
    assert run_segment(segment, token=0, attempt=1) == ExitCode.DATA_OR_REWARD
    error = journal(segment, "end")[0].payload["error"]
    assert error["code"] == "reward"
    assert "the judge gave no verdict on" in error["message"]
    assert "status 404" in error["message"]


# Judges that are the reward


def end_of(segment: SegmentDir) -> tuple[ExitCode, dict[str, Any]]:
    code = run_segment(segment, token=0, attempt=1)
    return code, journal(segment, "end")[0].payload["error"]


def test_a_trainer_refuses_a_copy_of_its_reward_model(toy: dict[str, Any], tmp_path: Path) -> None:
    """Whoever started it, and whatever was checked then: files may have changed since."""
    copy = shutil.copytree(toy["reward"]["sources"][0]["model"], tmp_path / "judge")
    judge = {"kind": "sequence_classifier", "model": str(copy)}
    code, error = end_of(toy_segment(tmp_path, {**toy, "gate": {**toy["gate"], "judge": judge}}))
    assert (code, error["code"]) == (ExitCode.BAD_SPEC, "spec")
    assert "holds the very weights of reward.sources.0.model" in error["message"]


def with_functions(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str, judge: str) -> None:
    """Register `rewarding` as a reward and `judging` as a judge, each by `module:attribute`."""
    register(folder, monkeypatch, REWARD_FUNCTIONS, rewarding=source)
    entries = next(folder.glob("*.dist-info")) / "entry_points.txt"
    entries.write_text(entries.read_text() + f"[{JUDGE_FUNCTIONS}]\njudging = {judge}\n")


def python_spec(toy: dict[str, Any]) -> dict[str, Any]:
    return {
        **toy,
        "iterations": 1,
        "reward": {"sources": [*toy["reward"]["sources"], {"kind": "python", "name": "rewarding"}]},
        "gate": {"judge": {"kind": "python", "name": "judging"}, "prompts": 4},
    }


@pytest.mark.parametrize(
    "judge", ["copied_functions:length", "copied_functions:alias", "scoring_for_tests:same_length"]
)
def test_a_trainer_refuses_a_function_that_is_its_reward_under_another_name(
    toy: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judge: str
) -> None:
    """A copied module, a second name of the function, and the same lines once more."""
    with_functions(tmp_path, monkeypatch, "scoring_for_tests:length", judge)
    text = FUNCTIONS + "\ndef same_length(words):\n    return len(words)\n\nalias = length\n"
    text = text.replace("words", "text")
    for module in ("scoring_for_tests", "copied_functions"):
        (tmp_path / f"{module}.py").write_text(text)
    code, error = end_of(toy_segment(tmp_path / "run", python_spec(toy)))
    assert (code, error["code"]) == (ExitCode.DATA_OR_REWARD, "data")
    assert "gate.judge.name 'judging' is the function of reward.sources.1 under another name" in error["message"]


def test_functions_that_read_alike_and_call_others_are_two(
    toy: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_functions(tmp_path, monkeypatch, "one_rule:score", "other_rule:score")
    for module, rule in (("one_rule", "len(text)"), ("other_rule", "-len(text)")):
        lines = f"def rule(text):\n    return {rule}\n\ndef score(text):\n    return rule(text)\n"
        (tmp_path / f"{module}.py").write_text(lines)
    assert run_segment(toy_segment(tmp_path / "run", python_spec(toy)), token=0, attempt=1) == ExitCode.DONE


@pytest.mark.parametrize(
    ("rule", "status"), [("3.0 * len(text) + 1.0", "failed"), ("float(sum(map(ord, text)) % 97)", "ok")]
)
def test_preflight_finds_a_judge_that_orders_answers_as_the_reward_does(
    toy: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str, status: str
) -> None:
    """What no look at code or weights can tell: another function of the same."""
    with_functions(tmp_path, monkeypatch, "scoring_for_tests:length", "other_rule:score")
    (tmp_path / "other_rule.py").write_text(f"def score(text):\n    return {rule}\n")
    spec = {**python_spec(toy), "preflight": {"audit_answers": 0}}
    segment = toy_segment(tmp_path / "run", spec)
    assert run_segment(segment, token=0, attempt=1) == ExitCode.DONE
    found = {each["check"]: each for each in journal(segment, "preflight")[0].payload["findings"]}
    assert found["judge"]["status"] == status
    assert ("that of reward.sources.1 have a correlation of 1.000" in found["judge"]["detail"]) is (status == "failed")
