"""What gates compare with: kept in checkpoints, judged anew by another judge or reward, and never mixed up."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ppo_core.evaluation.gate_state import GateState, KeptAnswers, gate_to_start_from
from ppo_core.evaluation.held_out import Answers, HeldOut
from ppo_core.scoring.combine import Reward
from ppo_core.scoring.pair_judge import Comparison, Pairs
from ppo_core.spec import RunSpec, parse_spec
from tests.ppo_core.tiny_models import tiny_tokenizer

NUM = 4
JUDGE = {"kind": "python", "name": "j"}
SERVED = {"kind": "openai", "url": "https://judge.example/v1", "served_model": "m"}


class By:
    """Scores a text by a function of it."""

    def __init__(self, value: Callable[[str], float]) -> None:
        self._value = value

    def score(self, prompts: Sequence[str], responses: Sequence[str], check: object = None) -> Sequence[object]:
        return [self._value(response) for response in responses]

    def close(self) -> None: ...


def scorer(value: Callable[[str], float]) -> Reward:
    return Reward(((By(value), 1.0),), 0.0)


class Comparing:
    """Prefers the longer of two answers, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Pairs] = []

    def compare(self, pairs: Pairs, check: object = None) -> Comparison:
        self.asked.append(pairs)
        both = zip(pairs.newer, pairs.older, strict=True)
        preferences = [float((len(newer) > len(older)) - (len(newer) < len(older))) for newer, older in both]
        return Comparison([*preferences], len(pairs.newer), 1, 0)

    def close(self) -> None: ...


@pytest.fixture
def raw(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps({"prompt": f"film {n}"}) + "\n" for n in range(NUM)))
    return {
        "name": "t",
        "policy": {"model": "/m"},
        "data": {"prompts": "/p", "held_out": str(tmp_path / "held_out.jsonl")},
        "reward": {"sources": [{"kind": "python", "name": "r"}]},
        "gate": {"judge": JUDGE, "prompts": NUM},
        "rollout": {"batch_size": 4},
    }


def stored(raw: dict[str, Any]) -> dict[str, Any]:
    """The spec as a checkpoint has it."""
    found: dict[str, Any] = json.loads(json.dumps(parse_spec(raw).model_dump(mode="json")))
    return found


def answers(*responses: str, scores: list[float | None], judged: list[float | None] | None) -> Answers:
    prompts = [f"film {n}" for n in range(len(responses))]
    return Answers(prompts, list(responses), [[1]] * len(responses), ["stop"] * len(responses), scores, judged, 1)


def held_out(
    spec: RunSpec, reward: Callable[[str], float], judge: Callable[[str], float] | None, pair: Any = None
) -> Any:
    return HeldOut(spec, tiny_tokenizer(), scorer(reward), None if judge is None else scorer(judge), pair)


START = answers("a", "bb", "ccc", "dddd", scores=[1.0, 2.0, 3.0, 4.0], judged=[0.0, 0.0, 0.0, 0.0])
LATER = answers("aa", "bb", "ccccc", "d", scores=[2.0, 3.0, 5.0, 7.0], judged=[1.0, 1.0, 0.0, -1.0])


def test_a_gate_is_held_with_what_was_kept(raw: dict[str, Any]) -> None:
    held = held_out(parse_spec(raw), len, len)
    state = held.start_gate(START)
    first = held.hold_gate(state, LATER)
    # Two won, one tied, one lost; the reward's rise is 1, 1, 2, 3, its mean 1.75, its deviation √(2.75 / 3).
    assert (first.verdict.against_last.wins, first.verdict.against_last.ties, first.verdict.against_last.losses) == (
        2,
        1,
        1,
    )
    assert first.verdict.rise.mean == 1.75
    assert first.verdict.rise.standard_error == pytest.approx((2.75 / 3 / 4) ** 0.5)
    assert first.state.start == state.start
    assert first.state.last == KeptAnswers(LATER.responses, LATER.scores, LATER.judge_scores)
    second = held.hold_gate(GateState.of(json.loads(json.dumps(first.state.as_dict()))), LATER)
    assert second.verdict.against_last.ties == NUM
    assert second.verdict.against_start == first.verdict.against_start


def test_a_judge_that_compares_is_asked_about_the_texts(raw: dict[str, Any]) -> None:
    judge = Comparing()
    held = held_out(parse_spec({**raw, "gate": {"judge": SERVED, "prompts": NUM}}), len, None, judge)
    begin, now = replace(START, judge_scores=None), replace(LATER, judge_scores=None)
    first = held.hold_gate(held.start_gate(begin), now)
    prompts = [f"film {n}" for n in range(NUM)]
    assert judge.asked == [Pairs(prompts, now.responses, begin.responses)]  # once: the last gate is the start
    assert first.verdict.against_start == first.verdict.against_last
    assert first.verdict.against_last.rate == (2 + 0.5) / NUM
    held.hold_gate(first.state, begin)
    assert judge.asked[1:] == [
        Pairs(prompts, begin.responses, now.responses), Pairs(prompts, begin.responses, begin.responses),
    ]  # fmt: skip
    assert (
        first.as_dict()["against_last"] | {"asked": 4, "swayed": 1, "unreadable": 0} == first.as_dict()["against_last"]
    )


def goes_on(raw: dict[str, Any], state: GateState, **groups: Any) -> GateState | None:
    """The gate's state after a roll back that changes groups of the spec."""
    spec = parse_spec({**raw, **groups})
    kept = gate_to_start_from(json.loads(json.dumps(state.as_dict())), stored(raw), spec, state.prompts)
    return None if kept is None else GateState.of(kept)


@pytest.fixture
def state(raw: dict[str, Any]) -> GateState:
    held = held_out(parse_spec(raw), len, len)
    return replace(held.hold_gate(held.start_gate(START), LATER).state, num_suspect=1)


@pytest.mark.parametrize(
    "groups",
    [
        {},
        {"kl": {"coef": 0.5}},
        {"gate": {"judge": JUDGE, "prompts": 2, "every": 7}},
        {"reward": {"sources": [{"kind": "python", "name": "r"}], "missing_eos_penalty": -3.0, "normalize": True}},
    ],
)
def test_what_judges_and_scores_alike_goes_on_as_it_was(raw: dict[str, Any], state: GateState, groups: Any) -> None:
    assert goes_on(raw, state, **groups) == state


@pytest.mark.parametrize(
    "judge", [{"kind": "python", "name": "other"}, {"kind": "sequence_classifier", "model": "/j"}, SERVED, None]
)
def test_another_judge_has_not_seen_the_kept_answers(raw: dict[str, Any], state: GateState, judge: Any) -> None:
    found = goes_on(raw, state, gate={"judge": judge, "prompts": NUM})
    assert found is not None
    assert (found.start.judged, found.last.judged, found.num_suspect) == (None, None, 0)
    assert (found.start.responses, found.last.scores) == (state.start.responses, state.last.scores)


def test_another_judge_judges_the_kept_answers_by_itself(raw: dict[str, Any], state: GateState) -> None:
    """The old judge's scores lie around 0, the new one's around 100: mixed, the new answers would win every pair."""
    found = goes_on(raw, state, gate={"judge": {"kind": "python", "name": "other"}, "prompts": NUM})
    assert found is not None
    spec = parse_spec({**raw, "gate": {"judge": {"kind": "python", "name": "other"}, "prompts": NUM}})
    held = held_out(spec, len, lambda text: 100.0 - len(text)).hold_gate(
        found, replace(LATER, judge_scores=[100.0 - len(text) for text in LATER.responses])
    )
    assert held.verdict.against_last.ties == NUM
    assert (held.verdict.against_start.wins, held.verdict.against_start.losses) == (1, 2)
    assert held.state.start.judged == [99.0, 98.0, 97.0, 96.0]


def test_another_reward_scores_the_last_gates_answers_by_itself(raw: dict[str, Any], state: GateState) -> None:
    """A reward ten times as large is no rise of the score."""
    reward = {"sources": [{"kind": "python", "name": "r", "weight": 10.0}]}
    found = goes_on(raw, state, reward=reward)
    assert found is not None
    assert (found.last.scores, found.num_suspect) == (None, 0)
    ten_times = [10.0 * score for score in (2.0, 2.0, 5.0, 1.0)]
    held = held_out(parse_spec({**raw, "reward": reward}), lambda text: 10.0 * len(text), len).hold_gate(
        found, replace(LATER, scores=ten_times)
    )
    assert held.verdict.rise.mean == 0.0


def test_a_judge_that_comes_later_still_has_the_start(raw: dict[str, Any]) -> None:
    """A run without a judge keeps the starting policy's answers all the same."""
    without = {**raw, "gate": {"judge": None, "prompts": NUM}}
    begun = held_out(parse_spec(without), len, None).start_gate(replace(START, judge_scores=None))
    kept = gate_to_start_from(begun.as_dict(), stored(without), parse_spec(raw), begun.prompts)
    assert kept is not None
    verdict = held_out(parse_spec(raw), len, len).hold_gate(
        GateState.of(kept), replace(LATER, judge_scores=[2.0, 2.0, 5.0, 1.0])
    )
    assert verdict.state.start.judged == [1.0, 2.0, 3.0, 4.0]
    assert (verdict.verdict.against_start.wins, verdict.verdict.against_start.ties) == (2, 1)


def test_other_prompts_and_other_forms_begin_anew(raw: dict[str, Any], state: GateState) -> None:
    spec, kept = parse_spec(raw), state.as_dict()
    assert gate_to_start_from(kept, stored(raw), spec, ["another", *state.prompts[1:]]) is None
    assert gate_to_start_from(kept, stored(raw), spec, []) is None
    assert gate_to_start_from(None, stored(raw), spec, state.prompts) is None
    older = {"start_judged": [0.0], "last_judged": [0.0], "last_scores": [0.0], "num_suspect": 0}
    assert gate_to_start_from(older, stored(raw), spec, state.prompts) is None


def test_more_prompts_are_compared_as_far_as_both_go(raw: dict[str, Any], state: GateState) -> None:
    """And the ones that are new count from the next gate on."""
    short = replace(state, prompts=state.prompts[:2], **{
        name: KeptAnswers(*(each[:2] for each in (kept.responses, kept.scores, kept.judged)))  # type: ignore[index]
        for name, kept in (("start", state.start), ("last", state.last))
    })  # fmt: skip
    assert gate_to_start_from(short.as_dict(), stored(raw), parse_spec(raw), state.prompts) == short.as_dict()
    held = held_out(parse_spec(raw), len, len).hold_gate(short, LATER)
    assert held.verdict.against_last.ties == 2
    assert len(held.state.last.responses) == NUM
    other = GateState.of({**held.state.as_dict(), "start": {**held.state.start.__dict__, "judged": None}})
    again = held_out(parse_spec(raw), len, len).hold_gate(other, LATER)
    assert again.state.start.judged == [1.0, 2.0]
