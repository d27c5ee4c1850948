"""A run in one process, through its own entry point: journal, metrics, samples, checkpoints, stops and faults."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ppo_core import registry
from ppo_core.errors import RunDirectoryError
from ppo_core.main import run_segment
from ppo_core.rundir import (
    ControlCommand,
    ExitCode,
    SegmentDir,
    checkpoints,
    next_start,
    send_command,
    verify_checkpoint,
)
from ppo_core.training.engine import TrainEngine
from tests.ppo_core.rollout.scripted_engine import ScriptedEngine, response
from tests.ppo_core.toy_run import journal, make_toy, other_classifier, timeless, toy_segment

Change = Callable[[Any], None]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def finished(toy: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> SegmentDir:
    """One undisturbed run of three iterations."""
    segment = toy_segment(tmp_path_factory.mktemp("run"), toy)
    assert run_segment(segment, token=0, attempt=1) == ExitCode.DONE
    return segment


def metrics_of(segment: SegmentDir) -> dict[int, dict[str, Any]]:
    """By iteration; an evaluation that was made after a restart is a second event of its iteration."""
    found: dict[int, dict[str, Any]] = {}
    for event in journal(segment, "metrics"):
        found.setdefault(event.iteration, {}).update(timeless(event.payload))
    return found


def policy_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "policy" / "model.safetensors")


def changed(toy: dict[str, Any], **groups: Any) -> dict[str, Any]:
    spec = copy.deepcopy(toy)
    for name, value in groups.items():
        spec[name] = {**spec[name], **value} if isinstance(value, dict) else value
    return spec


def test_the_journal_tells_the_whole_run(finished: SegmentDir) -> None:
    events = journal(finished)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert [event.iteration for event in events if event.type == "metrics"] == [0, 1, 2, 3]
    assert [event.iteration for event in events if event.type == "checkpoint"] == [2, 3]
    assert events[-1].type == "end"
    assert events[-1].payload == {"code": 0, "reason": "goal", "error": None}


def test_every_metric_is_in_the_registry_and_none_of_a_plain_run_is_missing(finished: SegmentDir) -> None:
    seen = {name for event in journal(finished, "metrics") for name in event.payload}
    for name in seen:
        assert registry.metric(name).name
    plain = {name for name in registry.METRICS if "*" not in name and not name.startswith("judge/")}
    assert plain - seen == set()


def test_metrics_are_within_their_legal_range(finished: SegmentDir) -> None:
    for event in journal(finished, "metrics"):
        for name, value in event.payload.items():
            legal = registry.metric(name).legal
            if value is not None and legal is not None:
                low, high = legal
                assert low is None or value >= low, name
                assert high is None or value <= high, name


def test_the_same_spec_and_seed_give_the_same_numbers(
    toy: dict[str, Any], finished: SegmentDir, tmp_path: Path
) -> None:
    again = toy_segment(tmp_path, toy)
    run_segment(again, token=0, attempt=1)
    assert metrics_of(again) == metrics_of(finished)
    other = toy_segment(tmp_path / "other", changed(toy, seed=2))
    run_segment(other, token=0, attempt=1)
    assert metrics_of(other) != metrics_of(finished)


def test_samples_carry_every_number_of_the_grid(finished: SegmentDir) -> None:
    event = next(event for event in journal(finished, "samples") if event.iteration == 1)
    lines = [json.loads(line) for line in (finished.path / event.payload["path"]).read_text().splitlines()]
    assert len(lines) == event.payload["num"] == 2
    for line in lines:
        assert line["kind"] == "train"
        for name in ("ids", "texts", "logprobs", "ref_logprobs", "kl", "rewards", "values", "advantages", "returns"):
            assert len(line["tokens"][name]) == line["length"], name
        total = sum(line["tokens"]["rewards"])
        kl = sum(line["tokens"]["kl"])
        assert total == pytest.approx(line["penalized_score"] - 0.05 * kl, abs=1e-5)


def test_a_checkpoint_is_whole_and_its_policy_loads(finished: SegmentDir) -> None:
    newest = checkpoints(finished)[-1]
    verify_checkpoint(newest)
    assert {"policy", "state", "state.json", "manifest.json"} == {child.name for child in newest.iterdir()}
    model = AutoModelForCausalLM.from_pretrained(newest / "policy")
    assert AutoTokenizer.from_pretrained(newest / "policy").eos_token == "</s>"
    assert not any(child.suffix in (".bin", ".pt", ".pkl", ".pth") for child in newest.rglob("*"))
    assert sum(1 for _ in model.parameters()) > 0


def test_a_finished_run_resumes_to_the_same_end(toy: dict[str, Any], finished: SegmentDir, tmp_path: Path) -> None:
    """Stopped after iteration 2 and started again in the same segment, iteration 3 is the undisturbed one's."""
    segment = toy_segment(tmp_path, changed(toy, checkpoints={"every": 1}))
    assert run_segment(segment, token=1, attempt=1, change=_stop_when(segment, 1, iteration=2)) == ExitCode.STOPPED
    assert [event.iteration for event in journal(segment, "metrics")][-1] == 2
    assert next_start(tmp_path) == segment.read_start()
    assert run_segment(segment, token=2, attempt=2) == ExitCode.DONE
    assert metrics_of(segment) == metrics_of(finished)
    mine, theirs = policy_weights(checkpoints(segment)[-1]), policy_weights(checkpoints(finished)[-1])
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def _stop_when(segment: SegmentDir, token: int, iteration: int, kind: str = "stop") -> Change:
    """Ask for a stop while `iteration` is being updated: it is finished, and then the run ends."""

    def change(trainer: Any) -> None:
        engine: TrainEngine = trainer.models.trainer
        step = engine.step

        def asking() -> Any:
            if trainer.control.iteration == iteration:
                send_command(segment, ControlCommand("c-1", kind, token))  # type: ignore[arg-type]
            return step()

        engine.step = asking  # type: ignore[method-assign]

    return change


@pytest.mark.parametrize(("kind", "code"), [("stop", ExitCode.STOPPED), ("pause", ExitCode.PAUSED)])
def test_a_stop_in_the_rollout_gives_the_iteration_up_and_saves_its_start(
    toy: dict[str, Any], tmp_path: Path, kind: str, code: ExitCode
) -> None:
    segment = toy_segment(tmp_path, toy)

    def change(trainer: Any) -> None:
        generate = trainer.models.engine.generate

        def asking(*args: Any, **kwargs: Any) -> Any:
            if trainer.control.iteration == 2:
                send_command(segment, ControlCommand("c-1", kind, 7))  # type: ignore[arg-type]
                trainer.control._looked_at = -math.inf
            return generate(*args, **kwargs)

        trainer.models.engine.generate = asking

    assert run_segment(segment, token=7, attempt=1, change=change) == code
    assert [event.iteration for event in journal(segment, "metrics")] == [0, 1]
    assert [path.name for path in checkpoints(segment)] == ["iter-000001"]
    assert [event.payload["status"] for event in journal(segment, "ack")] == ["accepted", "done"]


def test_a_stop_in_the_last_evaluation_leaves_it_owed_and_a_restart_makes_it(
    toy: dict[str, Any], finished: SegmentDir, tmp_path: Path
) -> None:
    segment = toy_segment(tmp_path, toy)

    def change(trainer: Any) -> None:
        answer = trainer.held_out.answer

        def asking(*args: Any) -> Any:
            if trainer.control.iteration == 3:
                send_command(segment, ControlCommand("c-1", "stop", 7))
                trainer.control._looked_at = -math.inf
            return answer(*args)

        trainer.held_out.answer = asking

    assert run_segment(segment, token=7, attempt=1, change=change) == ExitCode.STOPPED
    assert "heldout/score_mean" not in metrics_of(segment)[3]
    assert run_segment(segment, token=8, attempt=2) == ExitCode.DONE
    assert metrics_of(segment) == metrics_of(finished)


def test_a_command_for_another_token_is_not_obeyed(toy: dict[str, Any], tmp_path: Path) -> None:
    segment = toy_segment(tmp_path, changed(toy, iterations=1))
    send_command(segment, ControlCommand("c-1", "stop", 6))
    assert run_segment(segment, token=7, attempt=1) == ExitCode.DONE
    assert journal(segment, "ack") == []


def test_a_checkpoint_can_be_asked_for(toy: dict[str, Any], tmp_path: Path) -> None:
    segment = toy_segment(tmp_path, toy)
    assert run_segment(segment, 3, 1, change=_stop_when(segment, 3, 1, "checkpoint")) == ExitCode.DONE
    assert next(event.iteration for event in journal(segment, "checkpoint")) == 1


def test_a_journal_ahead_of_its_checkpoint_needs_a_new_segment(toy: dict[str, Any], tmp_path: Path) -> None:
    segment = toy_segment(tmp_path, changed(toy, checkpoints={"every": 100}))

    def change(trainer: Any) -> None:
        def die(*args: Any) -> None:
            raise KeyboardInterrupt

        trainer._after = die

    with pytest.raises(KeyboardInterrupt):
        run_segment(segment, token=1, attempt=1, change=change)
    assert run_segment(segment, token=2, attempt=2) == ExitCode.FAULT
    error = journal(segment, "end")[-1].payload["error"]
    assert error["code"] == RunDirectoryError.code
    assert "reaches iteration 1, the newest checkpoint only 0" in error["message"]
    assert next_start(tmp_path).segment == 2


def _update_only(fault: Change, from_iteration: int) -> Change:
    """Put a fault into the update pass only, from one iteration on."""

    def change(trainer: Any) -> None:
        engine = trainer.models.trainer
        forward = engine.forward

        def forward_with_fault(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and trainer.control.iteration >= from_iteration:
                fault(engine)
            return forward(*args, **kwargs)

        engine.forward = forward_with_fault

    return change


def _dropout(engine: Any) -> None:
    for module in engine.policy.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    engine.policy.train()


def _other_kernel(engine: Any) -> None:
    engine.policy.model.set_attn_implementation("eager")


def _shifted_positions(engine: Any) -> None:
    trunk = engine.policy.model.base_model
    if hasattr(trunk, "unshifted"):
        return
    trunk.unshifted = trunk.forward
    trunk.forward = lambda *args, position_ids, **kwargs: trunk.unshifted(
        *args, position_ids=position_ids + torch.arange(position_ids.shape[1]) // 2, **kwargs
    )


@pytest.mark.parametrize("fault", [_dropout, _other_kernel, _shifted_positions])
@pytest.mark.parametrize("from_iteration", [1, 3])
def test_a_fault_in_the_update_pass_ends_the_run_before_any_step_of_that_iteration(
    toy: dict[str, Any], tmp_path: Path, fault: Change, from_iteration: int
) -> None:
    segment = toy_segment(tmp_path, toy)
    seen: list[Any] = []

    def change(trainer: Any) -> None:
        seen.append(trainer)
        _update_only(fault, from_iteration)(trainer)

    assert run_segment(segment, token=0, attempt=1, change=change) == 70
    end = journal(segment, "end")[-1]
    assert end.payload["error"]["code"] == "first_minibatch_ratio"
    assert f"iteration {from_iteration}: before any update max |ratio - 1| is" in end.payload["error"]["message"]
    assert seen[0].models.trainer.num_steps == (from_iteration - 1) * 4
    assert max(metrics_of(segment)) == from_iteration - 1


def test_old_logprobs_are_complete_before_the_first_epoch(toy: dict[str, Any], tmp_path: Path) -> None:
    """Every no-grad pass over the policy comes before the first pass with a gradient, in each iteration."""
    order: list[tuple[int, bool]] = []

    def change(trainer: Any) -> None:
        engine = trainer.models.trainer
        forward = engine.forward

        def noting(*args: Any, **kwargs: Any) -> Any:
            order.append((trainer.control.iteration, torch.is_grad_enabled()))
            return forward(*args, **kwargs)

        engine.forward = noting

    run_segment(toy_segment(tmp_path, changed(toy, iterations=2)), token=0, attempt=1, change=change)
    for iteration in (1, 2):
        passes = [with_grad for number, with_grad in order if number == iteration]
        assert passes == sorted(passes)
        assert set(passes) == {False, True}


def test_a_missing_model_is_refused_with_its_path(toy: dict[str, Any], tmp_path: Path) -> None:
    segment = toy_segment(tmp_path, changed(toy, policy={"model": "/nowhere/model"}))
    assert run_segment(segment, token=0, attempt=1) == ExitCode.BAD_SPEC
    assert "/policy/model: '/nowhere/model' does not exist" in journal(segment, "end")[-1].payload["error"]["message"]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("limits", [{"top_p": 0.9, "top_k": 40}, {"min_new_tokens": 4}])
def test_with_renormalised_limits_ratio_and_engine_gap_are_those_of_full_sampling(
    toy: dict[str, Any], tmp_path: Path, limits: dict[str, Any], packed: bool
) -> None:
    """T08: the first ratio is 1, the first KL 0, and later ones are never clearly negative."""
    rollout = {"renormalize": True, **limits}
    segment = toy_segment(tmp_path, changed(toy, rollout=rollout, update={"token_budget": 100, "pack_rows": packed}))
    assert run_segment(segment, token=0, attempt=1) == ExitCode.DONE
    metrics = metrics_of(segment)
    for iteration in (1, 2, 3):
        assert metrics[iteration]["policy/first_minibatch_ratio_max_dev"] < 1e-4
        assert metrics[iteration]["rollout/engine_gap_max"] < 1e-4
        assert metrics[iteration]["kl/ref_token"] > -1e-3
    assert metrics[1]["kl/ref_token"] == 0
    assert metrics[3]["kl/ref_token_k3"] > 0
    if "top_k" in limits:
        assert metrics[1]["policy/entropy"] < math.log(40)
    else:
        assert metrics[1]["response/length_mean"] > 4


def test_a_negative_kl_is_told_in_the_journal(toy: dict[str, Any], finished: SegmentDir, tmp_path: Path) -> None:
    """T08: a reference that finds every drawn token likelier than the policy does."""

    def change(trainer: Any) -> None:
        reference = trainer.models.reference
        logprobs = reference.logprobs
        reference.logprobs = lambda *batch, **settings: logprobs(*batch, **settings) + 0.3

    segment = toy_segment(tmp_path, changed(toy, iterations=1))
    assert run_segment(segment, token=0, attempt=1, change=change) == ExitCode.DONE
    told = [event.payload["message"] for event in journal(segment, "note")]
    assert any(message.startswith("negative KL: kl/ref_token is -0.3 nats") for message in told)
    assert not any("negative KL" in event.payload["message"] for event in journal(finished, "note"))


def test_empty_ended_and_cut_off_responses_are_all_trained_on_and_counted(toy: dict[str, Any], tmp_path: Path) -> None:
    """T09, T03 and T33, through the entry point: [2], [7 8 9] with 9 a stop id, nothing, eight tokens cut off."""
    script = [response([2]), response([7, 8, 9]), response([], "length"), response([7, 8, 9, 4, 4, 7, 8, 4], "length")]

    def change(trainer: Any) -> None:
        trainer.models = replace(trainer.models, engine=ScriptedEngine(script))

    spec = changed(
        toy,
        iterations=1,
        rollout={"batch_size": 4, "stop_ids": [9]},
        samples={"per_iteration": 4},
        reward={"missing_eos_penalty": -1.0},
    )
    segment = toy_segment(tmp_path, {**spec, "kl": {"coef": 0.0}})
    assert run_segment(segment, token=0, attempt=1, change=change) == ExitCode.DONE
    metrics = metrics_of(segment)[1]
    assert metrics["response/eos_rate"] == 0.5
    assert metrics["response/empty"] == 2
    assert metrics["response/length_mean"] == 3
    assert metrics["data/response_tokens"] == 12
    assert metrics["data/prompts_trained"] == 4
    assert math.isfinite(metrics["policy/loss"])
    event = next(event for event in journal(segment, "samples") if event.iteration == 1)
    ended, stopped, empty, cut = (
        json.loads(line) for line in (segment.path / event.payload["path"]).read_text().splitlines()
    )
    assert ended["tokens"]["rewards"] == pytest.approx([ended["score"]])
    assert stopped["tokens"]["rewards"] == pytest.approx([0, 0, stopped["score"]])
    assert empty["tokens"]["rewards"] == []
    assert cut["tokens"]["rewards"] == pytest.approx([0] * 7 + [cut["score"] - 1])


def test_a_skipped_step_keeps_its_batch_and_the_others_their_metrics(toy: dict[str, Any], tmp_path: Path) -> None:
    """T21: one NaN gradient. What was skipped can be looked into; no loss of the iteration becomes NaN by it."""
    segment = toy_segment(tmp_path, toy)

    def change(trainer: Any) -> None:
        engine, count = trainer.models.trainer, itertools.count(1)
        backward = engine.backward
        engine.backward = lambda policy, value: backward(policy, value * math.nan if next(count) == 2 else value)

    assert run_segment(segment, 0, 1, change=change) == ExitCode.DONE
    first = next(event.payload for event in journal(segment, "metrics") if event.iteration == 1)
    assert first["optimizer/skipped"] == 1
    assert all(math.isfinite(first[name]) for name in ("policy/loss", "value/loss", "policy/grad_norm"))
    said = [event.payload["message"] for event in journal(segment, "note")]
    assert any("epoch 1, optimizer step 2 was skipped" in message for message in said)
    kept = load_file(segment.skipped / "iter-000001-epoch-1-step-2.safetensors")
    assert kept["input_ids"].shape[0] == 4
    assert kept["advantages"].shape == kept["response_mask"].shape


def test_a_run_of_skipped_steps_keeps_their_batches_and_fails(toy: dict[str, Any], tmp_path: Path) -> None:
    segment = toy_segment(tmp_path, changed(toy, update={**toy["update"], "max_skipped_steps": 3}))

    def change(trainer: Any) -> None:
        backward = trainer.models.trainer.backward
        trainer.models.trainer.backward = lambda policy, value: backward(policy, value * math.nan)

    assert run_segment(segment, 0, 1, change=change) == ExitCode.FAULT
    end = journal(segment, "end")[0].payload
    assert "not finite in 3 optimizer steps in a row" in end["error"]["message"]
    assert len(list(segment.skipped.iterdir())) == 3
    assert not list(segment.checkpoints.glob("iter-*"))


def test_an_iteration_that_was_given_up_is_not_told_as_reached(toy: dict[str, Any], tmp_path: Path) -> None:
    """A stop in the rollout of the second iteration: the run stands after the first, and says so everywhere."""
    segment = toy_segment(tmp_path, toy)

    def change(trainer: Any) -> None:
        generate = trainer.models.engine.generate

        def asking(*args: Any, **kwargs: Any) -> Any:
            if trainer.control.iteration == 2:
                send_command(segment, ControlCommand("c-1", "stop", 0))
                trainer.control._looked_at = -math.inf
            return generate(*args, **kwargs)

        trainer.models.engine.generate = asking

    assert run_segment(segment, 0, 1, change=change) == ExitCode.STOPPED
    assert [event.iteration for event in journal(segment) if event.type in ("checkpoint", "end")] == [1, 1]


def test_a_gate_that_judged_nothing_does_not_begin_anew(toy: dict[str, Any], tmp_path: Path) -> None:
    judge = {"kind": "sequence_classifier", "model": str(other_classifier(tmp_path / "judge"))}
    segment = toy_segment(tmp_path, changed(toy, iterations=1, gate={"every": 1, "prompts": 4, "judge": judge}))
    send_command(segment, ControlCommand("c-1", "stop", 1))
    assert run_segment(segment, token=1, attempt=1) == ExitCode.STOPPED
    assert segment.checkpoint(0).exists()
    assert run_segment(segment, token=2, attempt=2) == ExitCode.DONE
    assert not [event for event in journal(segment, "note") if "gate" in event.payload["message"]]


@pytest.mark.parametrize(
    ("which", "field"), [("policy", "policy.model"), ("reward_model", "reward.sources.0"), ("judge", "gate.judge")]
)
def test_weights_that_are_cut_short_are_bad_data(tmp_path: Path, which: str, field: str) -> None:
    spec = make_toy(tmp_path)
    spec["gate"]["judge"] = {"kind": "sequence_classifier", "model": str(other_classifier(tmp_path / "judge"))}
    file = tmp_path / which / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    segment = toy_segment(tmp_path / "run", spec)
    assert run_segment(segment, token=1, attempt=1) == ExitCode.DATA_OR_REWARD
    error = journal(segment, "end")[-1].payload["error"]
    assert error["code"] == "data"
    assert error["message"].startswith(f"{field}: the weights in {str(file)!r} are cut short")
    assert "ppo retry" in error["hint"]
