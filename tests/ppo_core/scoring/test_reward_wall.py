"""The reward wall, through the trainer's own entry point: no fault of a scorer harms more than its own responses."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from ppo_core.data.prompts import PromptBatch
from ppo_core.main import run_segment
from ppo_core.rundir import ExitCode, SegmentDir, checkpoints
from ppo_core.scoring.combine import Reward
from ppo_core.spec.scorers import REWARD_FUNCTIONS
from tests.ppo_core.rollout.scripted_engine import ScriptedEngine, response
from tests.ppo_core.scoring.registered import register
from tests.ppo_core.tiny_models import tiny_tokenizer
from tests.ppo_core.toy_run import journal, make_toy, toy_segment

pytestmark = pytest.mark.runs

ITERATIONS = 20
LIMIT_S = 1.0
# Those that need no process of their own come first: what becomes of them does not hang on how fast one starts.
WORDS = [" good", " bad", " raise", " nan", " none", " inf", " text", " true", " good", " die", " sleep"]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    spec = make_toy(tmp_path_factory.mktemp("toy"))
    return {**spec, "iterations": 1, "update": {**spec["update"], "minibatches": 1, "epochs": 1}}


class Scripted:
    """A source that gives back the same at every call."""

    def __init__(self, results: Any) -> None:
        self.results = results

    def score(self, prompts: Sequence[str], responses: Sequence[str], check: object = None) -> Sequence[object]:
        return self.results  # type: ignore[no-any-return]

    def close(self) -> None: ...


def scoring_processes() -> list[int]:
    return [
        child.pid
        for child in psutil.Process().children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE and "ppo_core.scoring.function_worker" in child.cmdline()
    ]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def metrics(segment: SegmentDir) -> list[dict[str, Any]]:
    return [event.payload for event in journal(segment, "metrics") if "reward/score_mean" in event.payload]


def samples(segment: SegmentDir) -> list[dict[str, Any]]:
    path = next(event.payload["path"] for event in journal(segment, "samples") if "train" in event.payload["path"])
    return [json.loads(line) for line in (segment.path / path).read_text().splitlines()]


def saying(words: Sequence[str]) -> ScriptedEngine:
    encode = tiny_tokenizer()
    return ScriptedEngine([response([*encode(word, add_special_tokens=False)["input_ids"], 2]) for word in words])


def test_a_run_goes_on_past_every_fault_and_nothing_stays_behind(
    toy: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T19: verl-project/verl#6673. A function that hangs, raises, dies and gives no score, at each of 20 steps."""
    register(tmp_path, monkeypatch, REWARD_FUNCTIONS)
    spec = {key: value for key, value in toy.items() if key not in ("gate", "evaluation")}
    spec |= {
        "iterations": ITERATIONS,
        "data": {key: value for key, value in toy["data"].items() if key != "held_out"},
        "rollout": {"batch_size": len(WORDS), "max_new_tokens": 8},
        "reward": {
            "sources": [{"kind": "python", "name": "by_text"}],
            "timeout_s": LIMIT_S,
            "max_invalid_share": 0.8,
        },
        "checkpoints": {"every": 1000},
    }
    segment = toy_segment(tmp_path / "run", spec)
    before, alive, seconds = open_files(), [], []

    def change(trainer: Any) -> None:
        trainer.models = replace(trainer.models, engine=saying(WORDS))
        run, score = trainer._one_iteration, trainer.models.reward.score

        def counted() -> Any:
            alive.append(len(scoring_processes()))
            return run()

        def timed(*texts: Sequence[str]) -> Any:
            began = time.monotonic()
            scores = score(*texts)
            seconds.append(time.monotonic() - began)
            return scores

        trainer._one_iteration = counted
        object.__setattr__(trainer.models.reward, "score", timed)

    assert run_segment(segment, token=0, attempt=1, change=change) == ExitCode.DONE
    assert alive == [1] * ITERATIONS
    assert scoring_processes() == []
    assert open_files() == before
    assert max(seconds) < LIMIT_S + 1.0
    told = metrics(segment)
    assert len(told) == ITERATIONS
    for row in told:
        found = {name.rpartition("/")[2]: count for name, count in row.items() if name.startswith("reward/invalid/")}
        hung = found.pop("timeout")
        died = found.pop("died", 0)  # On a busy machine the process that should die starts too late for it.
        assert (hung, died) in ((1, 1), (2, 0)), found
        assert found == {"error": 1, "nan": 1, "missing": 1, "infinite": 1, "wrong_type": 2}
        assert row["response/invalid"] == 8
        assert math.isfinite(row["policy/loss"])
    assert sum(row.get("reward/invalid/died", 0) for row in told) > ITERATIONS / 2
    assert told[-1]["data/prompts_trained"] == 3 * ITERATIONS
    assert told[-1]["data/prompts_failed"] == 8 * ITERATIONS


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([1.0] * 4, "5 of 5 scores are unusable .5 wrong_count., allowed are 10%; the first: 4 scores for 5"),
        ([1.0] * 6, "6 scores for 5 responses"),
        (["good"] * 5, "5 wrong_type"),
        (0.5, "a float is no list of scores"),
        (None, "a NoneType is no list of scores"),
        ([math.nan, 1.0, 1.0, 1.0, 1.0], "1 of 5 scores are unusable .1 nan."),
    ],
)
def test_more_faults_than_the_share_allows_stop_the_run_with_the_reason(
    toy: dict[str, Any], tmp_path: Path, results: Any, message: str
) -> None:
    spec = {**toy, "rollout": {"batch_size": 5, "max_new_tokens": 4}}
    segment = toy_segment(tmp_path, spec)

    def change(trainer: Any) -> None:
        reward = Reward(((Scripted(results), 1.0),), trainer.models.reward.max_invalid_share)
        trainer.models, trainer.held_out = replace(trainer.models, reward=reward), None

    assert run_segment(segment, token=0, attempt=1, change=change) == ExitCode.DATA_OR_REWARD
    (end,) = journal(segment, "end")
    assert end.payload["error"]["code"] == "reward"
    assert re.search(message, end.payload["error"]["message"])
    assert metrics(segment) == []


def test_rows_without_a_score_are_as_if_they_had_never_been(toy: dict[str, Any], tmp_path: Path) -> None:
    """T18: modelscope/ms-swift#8123. [1.0, NaN, None, inf, 0.5] trains as rows 0 and 4 alone would."""
    words = [" good", " bad", " film", " text", " none"]
    kept = (0, 4)

    def train(name: str, scores: list[object], rows: Sequence[int]) -> SegmentDir:
        spec = {**toy, "rollout": {"batch_size": len(rows), "max_new_tokens": 8}, "samples": {"per_iteration": 8}}
        segment = toy_segment(tmp_path / name, spec)

        def change(trainer: Any) -> None:
            all_rows = trainer.prompts.take(0, len(words))
            trainer.prompts.take = lambda cursor, num: _rows_of(all_rows, rows)
            reward = Reward(((Scripted(scores), 1.0),), max_invalid_share=0.8)
            engine = saying([words[row] for row in rows])
            trainer.models, trainer.held_out = replace(trainer.models, reward=reward, engine=engine), None

        assert run_segment(segment, token=0, attempt=1, change=change) == ExitCode.DONE
        return segment

    faulty = train("faulty", [1.0, math.nan, None, math.inf, 0.5], range(5))
    clean = train("clean", [1.0, 0.5], kept)
    (counted,), (plain,) = metrics(faulty), metrics(clean)
    assert {name: count for name, count in counted.items() if name.startswith("reward/invalid/")} == {
        "reward/invalid/nan": 1,
        "reward/invalid/missing": 1,
        "reward/invalid/infinite": 1,
    }
    assert math.isfinite(counted["policy/loss"])
    for name in ("policy/loss", "value/loss", "policy/grad_norm", "advantage/mean", "reward/score_mean"):
        assert counted[name] == pytest.approx(plain[name], rel=1e-5, abs=1e-6), name
    assert [row["score"] for row in samples(faulty)] == [1.0, 0.5]
    for ours, alone in zip(samples(faulty), samples(clean), strict=True):
        assert ours["tokens"]["advantages"] == pytest.approx(alone["tokens"]["advantages"], abs=1e-6)
    weights, others = (
        load_file(checkpoints(segment)[-1] / "policy" / "model.safetensors") for segment in (faulty, clean)
    )
    start = load_file(Path(toy["policy"]["model"]) / "model.safetensors")
    assert max(float((weights[name] - start[name]).abs().max()) for name in start) > 1e-4
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=0, atol=1e-6)


def _rows_of(batch: PromptBatch, rows: Sequence[int]) -> PromptBatch:
    return replace(
        batch,
        indices=[batch.indices[row] for row in rows],
        texts=[batch.texts[row] for row in rows],
        prompt_ids=[batch.prompt_ids[row] for row in rows],
    )
