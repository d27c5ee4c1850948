"""Services, fallbacks and left-out rows through the trainer's own entry point."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ppo_core.main import run_segment
from ppo_core.rundir import ExitCode, SegmentDir
from ppo_core.scoring.combine import Reward
from tests.ppo_core.rollout.scripted_engine import ScriptedEngine, response
from tests.ppo_core.scoring.live_service import Said, live_service, scores
from tests.ppo_core.tiny_models import tiny_tokenizer
from tests.ppo_core.toy_run import journal, make_toy, toy_segment

WORDS = [" good", " bad", " film", " text", " none"]
FAULTY = [1.0, math.nan, None, math.inf, 0.5]


class Scripted:
    """A source that gives back the same at every call."""

    def __init__(self, results: Sequence[object]) -> None:
        self.results = results

    def score(self, prompts: Sequence[str], responses: Sequence[str], check: object = None) -> Sequence[object]:
        return self.results

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    spec = make_toy(tmp_path_factory.mktemp("toy"))
    return {**spec, "iterations": 1, "update": {**spec["update"], "minibatches": 1}, "samples": {"per_iteration": 8}}


def train(folder: Path, spec: dict[str, Any], rows: Sequence[int], results: Sequence[object], **more: Any) -> Any:
    """One iteration of the rows named, of the five words as answers to the first five prompts; its segment."""
    segment = toy_segment(folder, {**spec, "rollout": {"batch_size": len(rows), "max_new_tokens": 8}})

    def change(trainer: Any) -> None:
        first = trainer.prompts.take(0, len(WORDS))
        kept = {
            name: [value[row] for row in rows]
            for name, value in vars(first).items()
            if isinstance(value, list) and len(value) == len(WORDS)
        }
        trainer.prompts.take = lambda cursor, num: replace(first, **kept)
        encode = tiny_tokenizer()
        ids = [encode(WORDS[row], add_special_tokens=False)["input_ids"] for row in rows]
        engine = ScriptedEngine([response([*each, 2]) for each in ids])
        reward = Reward(((Scripted(results), 1.0),), max_invalid_share=0.8, **more)
        trainer.models, trainer.held_out = replace(trainer.models, reward=reward, engine=engine), None

    assert run_segment(segment, token=0, attempt=1, change=change) == ExitCode.DONE
    return segment


def metrics(segment: SegmentDir) -> list[dict[str, Any]]:
    return [event.payload for event in journal(segment, "metrics") if "reward/score_mean" in event.payload]


def samples(segment: SegmentDir) -> list[dict[str, Any]]:
    path = next(event.payload["path"] for event in journal(segment, "samples") if "train" in event.payload["path"])
    return [json.loads(line) for line in (segment.path / path).read_text().splitlines()]


def test_other_rows_advantages_are_bit_equal_to_a_run_of_those_rows_alone(toy: dict[str, Any], tmp_path: Path) -> None:
    """T18: modelscope/ms-swift#8123."""
    faulty = samples(train(tmp_path / "faulty", toy, range(5), FAULTY))
    alone = samples(train(tmp_path / "alone", toy, (0, 4), [1.0, 0.5]))
    assert [row["score"] for row in faulty] == [1.0, 0.5]
    assert [row["tokens"]["advantages"] for row in faulty] == [row["tokens"]["advantages"] for row in alone]
    assert len({value for row in faulty for value in row["tokens"]["advantages"]}) > 2


def test_with_a_fallback_every_row_is_trained_on_and_the_faults_are_counted_all_the_same(
    toy: dict[str, Any], tmp_path: Path
) -> None:
    filled = train(tmp_path / "filled", toy, range(5), FAULTY, fallback=-2.0)
    plain = train(tmp_path / "plain", toy, range(5), [1.0, -2.0, -2.0, -2.0, 0.5])
    assert [row["tokens"] for row in samples(filled)] == [row["tokens"] for row in samples(plain)]
    assert [row["score"] for row in samples(filled)] == [1.0, -2.0, -2.0, -2.0, 0.5]
    (counted,), (clean,) = metrics(filled), metrics(plain)
    assert (counted["response/invalid"], clean["response/invalid"]) == (3, 0)
    assert [counted[f"reward/invalid/{reason}"] for reason in ("nan", "missing", "infinite")] == [1, 1, 1]
    assert counted["policy/loss"] == clean["policy/loss"]
    assert (counted["data/prompts_trained"], counted["data/prompts_failed"]) == (5, 0)
    assert counted["reward/source_mean/0"] == 0.75  # what the source said, and not what stood in for it


def http_spec(toy: dict[str, Any], url: str, **reward: Any) -> dict[str, Any]:
    source = {"kind": "http", "url": url, "batch_size": 1, "retries": 0}
    data = {name: value for name, value in toy["data"].items() if name != "held_out"}
    return {
        **toy,
        "iterations": 4,
        "data": data,
        "rollout": {"batch_size": 8, "max_new_tokens": 4},
        "reward": {"sources": [source], "timeout_s": 1.0, "max_invalid_share": 0.9, **reward},
    }


def test_a_service_with_every_fault_costs_its_own_responses_and_leaves_nothing_open(
    toy: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PPO_REWARD_HOSTS", "127.0.0.1")
    faults = {
        "timeout": Said(hangs=True),
        "http_status": Said(status=404),
        "unreachable": Said(closes=True),
        "nan": Said(b'{"scores": [NaN]}'),
        "missing": Said(b'{"scores": [null]}'),
        "wrong_count": scores(1.0, 2.0),
        "wrong_type": Said(b'{"scores": ["good"]}'),
    }
    asked: list[str] = []

    def answer(request: dict[str, Any]) -> Said:
        asked.append(request["prompts"][0])
        return [*faults.values(), scores(1.0)][(len(asked) - 1) % 8]

    before = len(os.listdir("/proc/self/fd"))
    with live_service(answer) as service:
        segment = toy_segment(tmp_path, http_spec(toy, service.url))
        assert run_segment(segment, token=0, attempt=1) == ExitCode.DONE
    assert len(os.listdir("/proc/self/fd")) == before
    told = metrics(segment)
    assert len(told) == 4
    for row in told:
        assert {reason: row.get(f"reward/invalid/{reason}") for reason in faults} == dict.fromkeys(faults, 1)
        assert row["response/invalid"] == 7
        assert row["reward/score_mean"] == 1.0
        assert math.isfinite(row["policy/loss"])
        assert row["time/score_s"] < 2.5


def test_a_service_that_is_gone_stops_the_run_with_the_reason(
    toy: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PPO_REWARD_HOSTS", "127.0.0.1")
    with live_service(lambda request: scores(1.0)) as service:
        pass
    for number, reward in enumerate(({}, {"fallback": 0.0})):  # a fallback does not hide that there is no reward
        segment = toy_segment(tmp_path / str(number), http_spec(toy, service.url, **reward))
        assert run_segment(segment, token=0, attempt=1) == ExitCode.DATA_OR_REWARD
        (end,) = journal(segment, "end")
        assert end.payload["error"]["code"] == "reward"
        assert "8 of 8 scores are unusable (8 unreachable), allowed are 90%" in end.payload["error"]["message"]
        assert metrics(segment) == []


def test_a_trainer_whose_environment_does_not_allow_the_host_refuses_the_spec(
    toy: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PPO_REWARD_HOSTS", raising=False)
    segment = toy_segment(tmp_path, http_spec(toy, "http://127.0.0.1:9/"))
    assert run_segment(segment, token=0, attempt=1) == ExitCode.BAD_SPEC
    (end,) = journal(segment, "end")
    assert "add it to PPO_REWARD_HOSTS" in end.payload["error"]["message"]
