"""What becomes of every prompt, through the entry point: trained, filtered or failed, cut or dropped, and in order."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from ppo_core.main import run_segment
from ppo_core.rundir import ControlCommand, ExitCode, SegmentDir, send_command
from ppo_core.scoring.combine import Reward
from ppo_core.seeds import generator
from tests.ppo_core.toy_run import journal, make_toy, toy_segment

pytestmark = pytest.mark.runs

LIMIT = 16


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The toy spec without evaluations, samples and most checkpoints."""
    spec = make_toy(tmp_path_factory.mktemp("toy"))
    spec["data"] = {"prompts": "", "max_prompt_tokens": LIMIT}
    spec["rollout"] |= {"max_new_tokens": 2}
    spec["update"] |= {"epochs": 1, "minibatches": 1}
    spec["samples"] = {"per_iteration": 0}
    spec["reward"] |= {"max_invalid_share": 0.99}
    return spec


@dataclass
class FailsOn:
    """Scores every response 1, but those to certain prompts not at all; it notes what it was asked."""

    failing: frozenset[str]
    asked: list[str]

    def score(self, prompts: Sequence[str], responses: Sequence[str], check: object = None) -> list[object]:
        self.asked += prompts
        return [None if prompt in self.failing else 1.0 for prompt in prompts]

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Case:
    """A run to be made: lengths of its prompts in tokens, which of them fail, and when it is stopped."""

    lengths: list[int]
    failing: list[bool]
    batch_size: int
    iterations: int
    seed: int
    stop_at: int | None
    in_rollout: bool


@st.composite
def cases(draw: st.DrawFn) -> Case:
    batch_size = draw(st.integers(2, 5))
    lengths = draw(st.lists(st.sampled_from([8, LIMIT, LIMIT + 1, 40]), min_size=batch_size, max_size=12))
    short = draw(st.integers(0, 3)) + batch_size
    lengths = [8] * max(0, short - sum(length <= LIMIT for length in lengths)) + lengths
    # One prompt of each batch at least is scored: of no score at all nothing could be learned.
    failing = [draw(st.booleans()) and number < batch_size - 1 for number in range(len(lengths))]
    iterations = draw(st.integers(1, 4))
    stop_at = draw(st.none() | st.integers(1, iterations))
    return Case(lengths, failing, batch_size, iterations, draw(st.integers(0, 99)), stop_at, draw(st.booleans()))


def texts_of(case: Case) -> list[str]:
    """Different texts of the lengths asked for, begin-of-text included; digits are a token each."""
    return [f"{number:02d}".ljust(length - 1, "7") for number, length in enumerate(case.lengths)]


def consumed(case: Case, used: int) -> tuple[int, list[int]]:
    """How many prompts of the seeded order are gone when `used` were used, and which were used: counted one by one."""
    gone, indices, epoch = 0, [], 0
    while len(indices) < used:
        order = torch.randperm(len(case.lengths), generator=generator(case.seed, "prompts", epoch)).tolist()
        left = sum(length <= LIMIT for length in case.lengths)
        for index in order:
            if len(indices) == used and left:
                break
            gone += 1
            if case.lengths[index] <= LIMIT:
                indices.append(index)
                left -= 1
        epoch += 1
    return gone, indices


def stop_in(segment: SegmentDir, case: Case, source: FailsOn, stop_at: int | None) -> Any:
    """A change of the trainer: its reward is `source`, and in iteration `stop_at` a stop is asked for."""

    def change(trainer: Any) -> None:
        object.__setattr__(trainer.models, "reward", Reward(((source, 1.0),), 0.99))
        holder, name = (
            (trainer.models.engine, "generate") if case.in_rollout else (trainer.models.engine, "sync_weights")
        )
        inner = getattr(holder, name)

        def asking(*args: Any, **kwargs: Any) -> Any:
            if trainer.control.iteration == stop_at:
                send_command(segment, ControlCommand("c-1", "stop", 1))
                trainer.control._looked_at = -math.inf
            return inner(*args, **kwargs)

        setattr(holder, name, asking)

    return change


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_every_prompt_is_trained_filtered_or_failed(toy: dict[str, Any], case: Case) -> None:
    """consumed = trained + filtered + failed after every iteration, through a stop in rollout or update and a restart;
    what is used is the seeded order without a gap and without a repeat."""
    texts = texts_of(case)
    failing = frozenset(text for text, fails in zip(texts, case.failing, strict=True) if fails)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.jsonl"
        path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        spec = {**toy, "seed": case.seed, "iterations": case.iterations, "data": {**toy["data"], "prompts": str(path)}}
        spec["rollout"] = {**toy["rollout"], "batch_size": case.batch_size}
        segment = toy_segment(Path(folder) / "run", spec)
        source = FailsOn(failing, [])
        code = run_segment(segment, token=1, attempt=1, change=stop_in(segment, case, source, case.stop_at))
        if code == ExitCode.STOPPED:
            code = run_segment(segment, token=2, attempt=2, change=stop_in(segment, case, source, None))
        assert code == ExitCode.DONE
        told = [event for event in journal(segment, "metrics") if event.iteration]
    assert [event.iteration for event in told] == list(range(1, case.iterations + 1))
    for event in told:
        trained, filtered, failed = (
            event.payload[f"data/prompts_{name}"] for name in ("trained", "filtered", "failed")
        )
        used = event.iteration * case.batch_size
        gone, indices = consumed(case, used)
        assert trained + failed == used
        assert failed == sum(case.failing[index] for index in indices)
        assert trained + filtered + failed == gone
    assert source.asked == [texts[index] for index in consumed(case, case.iterations * case.batch_size)[1]]


# T13


def prompts_of_one_iteration(toy: dict[str, Any], folder: Path, too_long: str) -> tuple[list[list[int]], SegmentDir]:
    """What the engine was given of prompts of 5, 16, 17 and 4000 tokens; the trainer must read the same."""
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": "x" * (length - 1)}) + "\n" for length in (5, 16, 17, 4000)))
    spec = {**toy, "iterations": 1, "data": {**toy["data"], "prompts": str(path), "too_long": too_long}}
    spec["rollout"] = {**toy["rollout"], "batch_size": 4 if too_long == "cut" else 2}
    segment = toy_segment(folder / "run", spec)
    given_ids: list[list[int]] = []
    sampled: set[tuple[int, ...]] = set()
    read: set[tuple[int, ...]] = set()

    def change(trainer: Any) -> None:
        generate, forward = trainer.models.engine.generate, trainer.models.trainer.forward

        def noting_prompts(prompt_ids: list[list[int]], **more: Any) -> Any:
            responses = generate(prompt_ids, **more)
            given_ids.extend(prompt_ids)
            sampled.update((*ids, *response.ids) for ids, response in zip(prompt_ids, responses, strict=True))
            return responses

        def noting_rows(batch: Any, **more: Any) -> Any:
            rows = zip(batch.input_ids, batch.attention_mask, strict=True)
            read.update(tuple(ids[mask.bool()].tolist()) for ids, mask in rows)
            return forward(batch, **more)

        trainer.models.engine.generate, trainer.models.trainer.forward = noting_prompts, noting_rows

    assert run_segment(segment, token=0, attempt=1, change=change) == ExitCode.DONE
    assert read == sampled
    return given_ids, segment


@pytest.mark.parametrize(("too_long", "lengths"), [("drop", [5, 16]), ("cut", [5, 16, 16, 16])])
def test_engine_and_trainer_hold_the_same_ids_of_prompts_within_the_limit(
    toy: dict[str, Any], tmp_path: Path, too_long: str, lengths: list[int]
) -> None:
    """T13: huggingface/trl#3569. 5 and 16 are untouched, 17 and 4000 are dropped or lose their beginning."""
    prompts, segment = prompts_of_one_iteration(toy, tmp_path, too_long)
    assert sorted(map(len, prompts)) == lengths
    assert all(row[0] == 1 for row in prompts)
    notes = [event.payload["message"] for event in journal(segment, "note")]
    assert notes[0].startswith("2 prompts of data.prompts are longer than data.max_prompt_tokens 16 and ")
    assert notes[0].endswith("lose their beginning" if too_long == "cut" else "are left out; 2 remain")
    events = [event.type for event in journal(segment)]
    assert events.index("note") < events.index("metrics")


def test_sixteen_and_sixteen_fill_a_context_of_32(toy: dict[str, Any], tmp_path: Path) -> None:
    """T14: huggingface/trl#1867. Accepted, and runs at full width."""
    config = Path(toy["policy"]["model"]) / "config.json"
    kept = config.read_text()
    path = tmp_path / "prompts.jsonl"
    path.write_text((json.dumps({"prompt": "x" * 15}) + "\n") * 4)
    spec = {**toy, "iterations": 1, "data": {**toy["data"], "prompts": str(path)}}
    spec["rollout"] = {**toy["rollout"], "batch_size": 4, "max_new_tokens": 16, "min_new_tokens": 15}
    spec["rollout"]["renormalize"] = True
    segment = toy_segment(tmp_path / "run", spec)
    try:
        config.write_text(json.dumps({**json.loads(kept), "max_position_embeddings": 32}))
        assert run_segment(segment, token=0, attempt=1) == ExitCode.DONE
    finally:
        config.write_text(kept)
    (metrics,) = (event.payload for event in journal(segment, "metrics") if event.iteration == 1)
    assert metrics["response/length_mean"] == 16
    assert metrics["policy/first_minibatch_ratio_max_dev"] < 1e-4


def test_a_run_whose_steps_are_all_skipped_does_not_succeed(toy: dict[str, Any], tmp_path: Path) -> None:
    """T12: OpenRLHF/OpenRLHF#1297. Zero updates are never a success."""
    path = tmp_path / "prompts.jsonl"
    path.write_text((json.dumps({"prompt": "the film"}) + "\n") * 8)
    spec = {**toy, "iterations": 1, "data": {**toy["data"], "prompts": str(path)}}
    segment = toy_segment(tmp_path / "run", spec)

    def change(trainer: Any) -> None:
        backward = trainer.models.trainer.backward
        trainer.models.trainer.backward = lambda policy, value: backward(policy, value * math.nan)

    assert run_segment(segment, token=0, attempt=1, change=change) not in (ExitCode.DONE, ExitCode.STOPPED)
    assert "not one optimizer step was applied" in journal(segment, "end")[0].payload["error"]["message"]


def test_conversations_are_trained_on(toy: dict[str, Any], tmp_path: Path) -> None:
    """From a Parquet file to a trained policy, with the template's text in front of the engine."""
    messages = [[{"role": "user", "content": f"f{number}</s>"}] for number in range(4)]
    parquet.write_table(pyarrow.table({"messages": messages}), tmp_path / "prompts.parquet")
    template = Path(toy["policy"]["model"]) / "chat_template.jinja"
    spec = {**toy, "iterations": 1, "data": {"prompts": str(tmp_path / "prompts.parquet"), "max_prompt_tokens": 48}}
    spec["rollout"] = {**toy["rollout"], "batch_size": 4}
    refused = toy_segment(tmp_path / "refused", spec)
    assert run_segment(refused, token=0, attempt=1) == ExitCode.BAD_SPEC
    assert "has no chat template" in journal(refused, "end")[0].payload["error"]["message"]
    segment = toy_segment(tmp_path / "run", {**spec, "samples": {"per_iteration": 4}})
    try:
        template.write_text("{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}:")
        assert run_segment(segment, token=0, attempt=1) == ExitCode.DONE
    finally:
        template.unlink()
    (event,) = journal(segment, "samples")
    lines = [json.loads(line) for line in (segment.path / event.payload["path"]).read_text().splitlines()]
    assert sorted(line["prompt"] for line in lines) == [f"f{number}</s>" for number in range(4)]
