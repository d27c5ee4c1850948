"""Held-out evaluation: the same prompts and seeds each time, scored by the reward and by the judge."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ppo_core.errors import DataError
from ppo_core.evaluation.held_out import HeldOut
from ppo_core.models.policy import PolicyModel
from ppo_core.rollout.transformers_engine import TransformersEngine
from ppo_core.scoring.combine import Reward
from ppo_core.spec import RunSpec, parse_spec
from tests.ppo_core.rollout.scripted_engine import ScriptedEngine, response
from tests.ppo_core.tiny_models import tiny_model, tiny_tokenizer


class Length:
    """Scores a response by its characters, or not at all when it has none."""

    def score(self, prompts: Sequence[str], responses: Sequence[str], check: object = None) -> Sequence[object]:
        return [len(response) or None for response in responses]

    def close(self) -> None: ...


REWARD = Reward(((Length(), 1.0),), 0.5)


def spec(folder: Path, **changes: Any) -> RunSpec:
    (folder / "held_out.jsonl").write_text("".join(json.dumps({"prompt": f"film {n}"}) + "\n" for n in range(9)))
    return parse_spec(
        {
            "name": "t",
            "policy": {"model": "/m"},
            "data": {"prompts": "/p", "held_out": str(folder / "held_out.jsonl")},
            "reward": {"sources": [{"kind": "python", "name": "length"}]},
            "rollout": {"batch_size": 4, "max_new_tokens": 6},
            "update": {"minibatches": 2},
            **changes,
        }
    )


def test_the_first_prompts_are_answered_and_scored_in_order(tmp_path: Path) -> None:
    held_out = HeldOut(spec(tmp_path, evaluation={"prompts": 5}), tiny_tokenizer(), REWARD, None)
    (good,) = tiny_tokenizer()([" good"])["input_ids"]
    engine = ScriptedEngine([response([*good, 2]), response([], "length")], version=3)
    answers = held_out.answer(engine)
    assert answers.prompts == [f"film {n}" for n in range(5)]
    assert answers.responses == [" good", "", " good", "", " good"]
    assert answers.scores == [5.0, None, 5.0, None, 5.0]
    assert answers.finish_reasons == ["stop", "length", "stop", "length", "stop"]
    assert answers.ids[0] == [*good, 2]
    assert answers.judge_scores is None
    assert answers.judge_mean is None
    assert answers.policy_version == 3


def test_two_evaluations_of_one_policy_are_the_same(tmp_path: Path) -> None:
    chosen = spec(tmp_path)
    engine = TransformersEngine(PolicyModel(tiny_model(vocab_size=300)), tiny_tokenizer(), chosen.rollout)
    held_out = HeldOut(chosen, tiny_tokenizer(), REWARD, REWARD)
    first = held_out.answer(engine)
    assert held_out.answer(engine) == first
    assert len({tuple(ids) for ids in first.ids}) == 9
    assert first.judge_scores == first.scores
    usable = [score for score in first.scores if score is not None]
    assert first.judge_mean == pytest.approx(sum(usable) / len(usable))


def test_a_gate_uses_its_own_number_of_prompts(tmp_path: Path) -> None:
    held_out = HeldOut(spec(tmp_path, gate={"prompts": 3}, evaluation={"prompts": 7}), tiny_tokenizer(), REWARD, REWARD)
    (good,) = tiny_tokenizer()([" good"])["input_ids"]
    answers = held_out.answer(ScriptedEngine([response(good)]))
    assert len(answers.scores) == 7
    state = held_out.start_gate(answers)
    assert state.prompts == ["film 0", "film 1", "film 2"]
    assert state.start.judged == state.last.scores == [5.0] * 3
    held = held_out.hold_gate(state, answers)
    assert held.verdict.against_last.ties == 3
    assert not held.verdict.tripped
    assert held.asked is None


def test_no_held_out_file_is_a_data_error(tmp_path: Path) -> None:
    without = spec(tmp_path, data={"prompts": "/p"})
    with pytest.raises(DataError, match="names no file"):
        HeldOut(without, tiny_tokenizer(), REWARD, None)
