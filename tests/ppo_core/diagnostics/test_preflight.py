"""Checks before the first iteration: each finds the fault that is planted for it, and nothing in a healthy run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ppo_core.diagnostics.preflight as preflight
from ppo_core.diagnostics.reward_audit import against_beginnings, against_length, correlation, spread
from ppo_core.main import run_segment
from ppo_core.rundir import ExitCode, SegmentDir
from ppo_core.scoring.combine import Reward
from tests.ppo_core.diagnostics.planted import Lengths, Vowels, off_by_one
from tests.ppo_core.toy_run import journal, make_toy, toy_segment

Change = Callable[[Any], None]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    spec = make_toy(tmp_path_factory.mktemp("toy"))
    spec["data"]["held_out"] = None
    spec["rollout"]["stop_ids"] = list(range(3, 50))
    return {**spec, "iterations": 1, "preflight": {"audit_answers": 32}}


class Checked:
    """One trainer whose checks can be made again and again, with faults in between."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def findings(self, **changes: Any) -> dict[str, tuple[str, str]]:
        trainer = self.trainer
        made = {
            "spec": trainer.spec,
            "models": trainer.models,
            "prompts": trainer.prompts,
            "tokenizer": trainer.tokenizer,
            "held_out": trainer.held_out,
        }
        made |= changes
        found = preflight.Preflight(trainer.segment, check=trainer.control.check, **made).findings()
        assert all(each.remedy for each in found if each.status != "ok")
        return {each.check: (each.status, each.detail) for each in found}

    def rewarded(self, source: Any, share: float = 0.9) -> Any:
        return replace(self.trainer.models, reward=Reward(((source, 1.0),), share))


@pytest.fixture(scope="module")
def run(toy: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Checked, SegmentDir]:
    """The trainer of a run that is over, with its engine still there."""
    segment = toy_segment(tmp_path_factory.mktemp("run"), toy)
    kept: list[Any] = []
    assert run_segment(segment, 0, 1, change=kept.append) == ExitCode.DONE
    return Checked(kept[0]), segment


@pytest.fixture
def checked(run: tuple[Checked, SegmentDir]) -> Checked:
    return run[0]


CHECKS = [
    "checkpoint", "alignment", "averages", "engine_parity", "reward", "reward_length", "reward_prefix", "reward_spread",
    "end_of_text", "pad_token", "prompts", "meaning", "disk", "memory",
]  # fmt: skip


def test_a_healthy_run_is_checked_once(run: tuple[Checked, SegmentDir]) -> None:
    _, segment = run
    events = [event.type for event in journal(segment)]
    assert events.count("preflight") == 1
    assert events.index("preflight") < events.index("metrics")
    findings = journal(segment, "preflight")[0].payload["findings"]
    assert [finding["check"] for finding in findings] == CHECKS
    assert all(set(finding) == {"check", "status", "detail", "remedy"} for finding in findings)
    assert {finding["check"] for finding in findings if finding["status"] == "failed"} == set()
    assert not (segment.path / ".preflight").exists()
    assert run_segment(segment, 0, 2) == ExitCode.DONE
    assert [event.type for event in journal(segment)].count("preflight") == 1


def test_the_checks_change_no_number_of_the_run(toy: dict[str, Any], run: Any, tmp_path: Path) -> None:
    unchecked = toy_segment(tmp_path, {**toy, "preflight": {"enabled": False}})
    assert run_segment(unchecked, 0, 1) == ExitCode.DONE
    assert not journal(unchecked, "preflight")
    one, other = (journal(segment, "metrics")[0].payload for segment in (run[1], unchecked))
    assert [one[name] for name in ("policy/loss", "kl/ref_token", "reward/score_mean")] == [
        other[name] for name in ("policy/loss", "kl/ref_token", "reward/score_mean")
    ]


def test_the_audit_can_be_left_out(checked: Checked) -> None:
    spec = checked.trainer.spec
    off = spec.model_copy(update={"preflight": spec.preflight.model_copy(update={"audit_answers": 0})})
    assert set(CHECKS) - set(checked.findings(spec=off)) == {"reward_length", "reward_prefix", "reward_spread"}


@pytest.fixture
def restored(checked: Checked) -> Iterator[Checked]:
    """Whatever is planted in the engine or the reference is taken out again."""
    engine, reference = checked.trainer.models.trainer, checked.trainer.models.reference
    yield checked
    for each in (engine, reference):
        for name in ("forward", "logprobs"):
            each.__dict__.pop(name, None)


def test_logprobs_one_token_off_are_found_by_a_row_alone(restored: Checked) -> None:
    off_by_one(restored.trainer)
    found = restored.findings()
    assert found["alignment"][0] == "failed"
    assert "alone and unpadded has other logprobs" in found["alignment"][1]
    assert found["engine_parity"][0] in ("warning", "failed")


def test_padding_that_changes_a_row_is_found(restored: Checked) -> None:
    """A pass whose numbers depend on how wide its batch is."""
    engine = restored.trainer.models.trainer
    forward = engine.forward

    def by_width(batch: Any, **more: Any) -> Any:
        output = forward(batch, **more)
        return replace(output, logprobs=output.logprobs * (1 + 0.01 * batch.mask.shape[1]))

    engine.forward = by_width
    assert restored.findings()["alignment"][0] == "failed"


def test_an_average_over_padding_is_found(checked: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.masked, "masked_mean", lambda x, mask: torch.where(mask, x, 0.0).sum() / mask.numel())
    status, detail = checked.findings()["averages"]
    assert status == "failed"
    assert "by the recorded lengths" in detail


def test_an_engine_that_samples_another_distribution_is_found(checked: Checked) -> None:
    engine = checked.trainer.models.engine

    class Other:
        version, rows_at_once = 0, None

        def generate(self, *prompts: Any, **more: Any) -> Any:
            found = engine.generate(*prompts, **more)
            return [replace(each, logprobs=[logprob - 0.5 for logprob in each.logprobs]) for each in found]

    assert checked.findings(models=replace(checked.trainer.models, engine=Other()))["engine_parity"][0] == "failed"


def test_a_checkpoint_that_cannot_be_written_is_found(checked: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    from ppo_core.errors import CheckpointError

    def refused(*arguments: Any) -> str:
        raise CheckpointError("the disk is read-only")

    monkeypatch.setattr(preflight, "write_checkpoint", refused)
    assert checked.findings()["checkpoint"] == ("failed", "the disk is read-only")


def test_a_tensor_that_reads_otherwise_is_found(checked: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    class Zeros(preflight.SavedTensors):
        def __getitem__(self, name: str) -> torch.Tensor:
            return torch.zeros_like(super().__getitem__(name))

    monkeypatch.setattr(preflight, "SavedTensors", Zeros)
    status, detail = checked.findings()["checkpoint"]
    assert status == "failed"
    assert "reads otherwise than it was written" in detail


class Sometimes(Vowels):
    def score(self, prompts: Any, responses: Any, check: object = None) -> list[object]:
        return [None if place % 2 else float(len(text)) for place, text in enumerate(responses)]


class Prompts(Vowels):
    def score(self, prompts: Any, responses: Any, check: object = None) -> list[object]:
        return [float(sum(map(ord, prompt))) for prompt in prompts]


class Same(Vowels):
    def score(self, prompts: Any, responses: Any, check: object = None) -> list[object]:
        return [1.0 for _ in responses]


def test_scores_that_cannot_be_used_are_counted(checked: Checked) -> None:
    status, detail = checked.findings(models=checked.rewarded(Sometimes()))["reward"]
    assert status == "warning"
    assert "12 of 24 scores are unusable: 12 missing" in detail
    found = checked.findings(models=checked.rewarded(Sometimes(), 0.1))
    assert found["reward"][0] == found["audit"][0] == "failed"


def test_a_reward_for_length_is_found_in_two_ways(checked: Checked) -> None:
    found = checked.findings(models=checked.rewarded(Lengths()))
    assert found["reward_length"][0] == found["reward_prefix"][0] == "warning"


def test_a_reward_of_the_prompt_alone_is_found(checked: Checked) -> None:
    assert checked.findings(models=checked.rewarded(Prompts()))["reward_spread"][0] == "warning"
    assert checked.findings(models=checked.rewarded(Same()))["reward_spread"][0] == "failed"


def test_answers_that_never_end_are_found(checked: Checked) -> None:
    engine = checked.trainer.models.engine

    class Endless:
        version, rows_at_once = 0, None

        def generate(self, *prompts: Any, **more: Any) -> Any:
            return [replace(each, finish_reason="length") for each in engine.generate(*prompts, **more)]

    found = checked.findings(models=replace(checked.trainer.models, engine=Endless()))
    assert found["end_of_text"] == ("warning", "0 of 24 answers ended by themselves")


def test_a_pad_id_that_is_the_end_of_text_is_told(checked: Checked) -> None:
    tokenizer = copy.deepcopy(checked.trainer.tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    assert checked.findings(tokenizer=tokenizer)["pad_token"][0] == "warning"


def test_prompts_that_are_too_long_are_counted(checked: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked.trainer.prompts, "num_too_long", 3)
    assert checked.findings()["prompts"][1].startswith("3 prompts are longer than data.max_prompt_tokens 32")


def test_too_little_disk_and_memory_are_told(checked: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = preflight.estimate(checked.trainer.spec)
    assert numbers.memory is not None
    huge = replace(numbers, disk_bytes=2**60, memory=replace(numbers.memory, host_bytes=2**60))
    monkeypatch.setattr(preflight, "estimate", lambda spec: huge)
    found = checked.findings()
    assert found["disk"][0] == found["memory"][0] == "warning"


def test_correlation_by_hand() -> None:
    assert correlation([1, 2, 3], [2, 4, 6]) == pytest.approx(1.0)
    assert correlation([1, 2, 3], [3, 2, 4]) == pytest.approx(0.5)
    assert correlation([1, 1, 1], [1, 2, 3]) is None


def test_the_audits_bounds() -> None:
    assert against_length([float(n) for n in range(10)], range(10)).status == "warning"
    assert against_length([1.0, 0.0] * 5, range(10)).status == "ok"
    assert against_length([None] * 10, range(10)).status == "ok"
    assert against_beginnings([2.0] * 9 + [0.0], [1.0] * 10).status == "warning"
    assert against_beginnings([2.0, 0.0] * 5, [1.0] * 10).status == "ok"
    assert against_beginnings([2.0] * 7, [1.0] * 7).status == "ok"
    assert spread([1.0, 1.01, 5.0, 5.01], [0, 0, 1, 1]).status == "warning"
    assert spread([1.0, 5.0, 1.0, 5.0], [0, 0, 1, 1]).status == "ok"
    assert spread([2.0, 2.0], [0, 1]).status == "failed"
    assert spread([None, 2.0], [0, 1]).status == "failed"
