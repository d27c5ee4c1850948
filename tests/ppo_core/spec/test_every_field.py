"""Every spec field does something: a toy run with another value differs where the field's case says that it shows."""

from __future__ import annotations

import ast
import contextlib
import copy
import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForSequenceClassification

from ppo.pruning import Pruner
from ppo_core.main import run_segment
from ppo_core.rundir import checkpoints
from ppo_core.spec import RunSpec, parse_spec
from ppo_core.spec.fields import every_field, group_in
from ppo_core.spec.scorers import JUDGE_FUNCTIONS, REWARD_FUNCTIONS
from tests.ppo_core.scoring.chat_service import completion, preferring
from tests.ppo_core.scoring.live_service import Said, live_service, scores
from tests.ppo_core.scoring.registered import register
from tests.ppo_core.spec.field_cases import CASES, SHOWN_BY
from tests.ppo_core.tiny_models import tiny_config, tiny_model, tiny_tokenizer
from tests.ppo_core.toy_run import TOKENS, journal, make_toy, timeless, toy_segment

pytestmark = pytest.mark.runs

ROOT = Path(__file__).resolve().parents[3]
FUNCTIONS = """
import time

def share_of_vowels(text):
    return sum(text.count(vowel) for vowel in "aeiou") / (1 + len(text))

def slow(text):
    time.sleep(0.05)
    return float(len(text))

def sometimes(text):
    return None if len(text) % 2 else 1.0
"""
Views = dict[str, Any]


class Toys:
    """The toy, all that its variants name, and the runs made of it so far."""

    def __init__(self, folder: Path, services: dict[str, str]) -> None:
        self.folder = folder
        self.spec = {**make_toy(folder), "iterations": 2}
        torch.manual_seed(7)
        policy = tiny_model("llama", vocab_size=TOKENS, initializer_range=0.06)
        reward = LlamaForSequenceClassification(tiny_config("llama", vocab_size=TOKENS, num_labels=1))
        against = LlamaForSequenceClassification.from_pretrained(folder / "reward_model")
        with torch.no_grad():
            against.score.weight.neg_()
        models = {"other_policy": policy, "other_reward": reward, "against_reward": against}
        for name, model in models.items():
            model.save_pretrained(folder / name)
            tokenizer = tiny_tokenizer()
            tokenizer.chat_template = "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}; {% endfor %}"
            tokenizer.save_pretrained(folder / name)
        rows = [{"prompt": f"other prompt {'very ' * (i % 3)}{i}"} for i in range(20)]
        (folder / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.places = {f"{{{name}}}": str(folder / name) for name in ("reward_model", *models)}
        self.places.update(services)
        self.places["{other_prompts}"] = str(folder / "other.jsonl")
        self._seen: dict[str, Views] = {}

    def with_values(self, *changes: dict[str, Any]) -> dict[str, Any]:
        """The toy's spec with dotted fields set, names in braces filled in."""
        data = copy.deepcopy(self.spec)
        for change in changes:
            for name, value in change.items():
                keys = name.replace("[]", ".0").split(".")
                node: Any = data
                for key in keys[:-1]:
                    node = node[int(key)] if isinstance(node, list) else node.setdefault(key, {})
                node[keys[-1]] = self._filled_in(value)
        return data

    def seen(self, spec: dict[str, Any], fault: str) -> Views:
        """What can be seen of a run of this spec; made once."""
        key = json.dumps([spec, fault], sort_keys=True)
        if key not in self._seen:
            self._seen[key] = views_of_a_run(self.folder / "runs" / str(len(self._seen)), spec, fault)
        return self._seen[key]

    def _filled_in(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.places.get(value, value)
        if isinstance(value, dict):
            return {key: self._filled_in(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._filled_in(item) for item in value]
        return value


def views_of_a_run(run_dir: Path, spec: dict[str, Any], fault: str) -> Views:
    segment = toy_segment(run_dir, spec)
    passes: Counter[tuple[int, ...]] = Counter()

    def change(trainer: Any) -> None:
        layer = next(m for m in trainer.models.trainer.policy.modules() if type(m).__name__ == "LlamaMLP")
        layer.register_forward_pre_hook(lambda module, inputs: passes.update([tuple(inputs[0].shape[:2])]))
        if fault:
            FAULTS[fault](trainer)

    code = run_segment(segment, token=0, attempt=1, change=change)
    end = journal(segment, "end")[0].payload
    metrics: dict[int, Any] = {}
    for event in journal(segment, "metrics"):
        metrics.setdefault(event.iteration, {}).update(timeless(event.payload))
    written = checkpoints(segment)
    weights = {
        str(file.relative_to(segment.path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for folder in written
        for file in sorted(folder.rglob("*.safetensors"))
    }
    names = [folder.name for folder in written]
    if written:
        assert Pruner(run_dir, parse_spec(spec).checkpoints).prune() == []
    return {
        "metrics": metrics,
        "weights": weights,
        "samples": {file.name: file.read_text() for file in sorted(segment.samples.iterdir())},
        "checkpoints": names,
        "kept": [folder.name for folder in checkpoints(segment)],
        "passes": dict(passes),
        "end": (int(code), end["reason"], end["error"] and end["error"]["code"]),
    }


def _nan_losses(trainer: Any) -> None:
    backward = trainer.models.trainer.backward
    trainer.models.trainer.backward = lambda policy, value: backward(policy, value * math.nan)


def _drifting_logprobs(trainer: Any) -> None:
    """Each pass of the update differs a little from the old one, as with another kernel."""
    forward = trainer.models.trainer.forward

    def drifting(batch: Any, entropy: str, **more: Any) -> Any:
        output = forward(batch, entropy=entropy, **more)
        return output if entropy == "none" else replace(output, logprobs=output.logprobs + 0.1)

    trainer.models.trainer.forward = drifting


def _hacked_reward(trainer: Any) -> None:
    """From each evaluation to the next the reward's scores of held-out answers rise, and the judge's fall."""
    answer, count = trainer.held_out.answer, itertools.count()

    def hacked(*arguments: Any) -> Any:
        found, more = answer(*arguments), 10.0 * next(count)
        scores = [score + more for score in found.scores]
        return replace(found, scores=scores, judge_scores=[score - more for score in found.judge_scores])

    trainer.held_out.answer = hacked


FAULTS: dict[str, Callable[[Any], None]] = {"nan": _nan_losses, "drift": _drifting_logprobs, "hacking": _hacked_reward}


def _places_in_the_batch(request: dict[str, Any]) -> Said:
    """Scores that tell how responses were put into requests."""
    return scores(*(float(place) for place, _ in enumerate(request["responses"])))


def _lengths(request: dict[str, Any]) -> Said:
    return scores(*(float(len(response)) for response in request["responses"]))


def _chat(request: dict[str, Any]) -> Said:
    """A model that prefers by its name and by the question, and needs two tokens to say so."""
    if request["max_tokens"] < 2:
        return completion("fir")
    sign = -1 if request["model"] == "prefers-shorter" else 1
    sign *= -1 if "not better" in request["messages"][0]["content"] else 1
    return preferring(lambda text: sign * len(text))(request)


def _every_other_time(count: Iterator[int]) -> Callable[[dict[str, Any]], Said]:
    return lambda request: _lengths(request) if next(count) % 2 else Said(status=503)


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toys]:
    functions = tmp_path_factory.mktemp("functions")
    (functions / "functions_of_the_toy.py").write_text(FUNCTIONS)
    more = {name: f"functions_of_the_toy:{name}" for name in ("share_of_vowels", "slow", "sometimes")}
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setenv("PPO_REWARD_HOSTS", "127.0.0.1")
        answers = {
            "service": _places_in_the_batch,
            "other_service": _lengths,
            "chat_service": _chat,
            "flaky_service": _every_other_time(itertools.count()),
        }
        services = {f"{{{name}}}": stack.enter_context(live_service(answer)).url for name, answer in answers.items()}
        register(functions, patch, REWARD_FUNCTIONS, **more)
        entry_points = next(functions.glob("*.dist-info")) / "entry_points.txt"
        judges = entry_points.read_text().replace(REWARD_FUNCTIONS, JUDGE_FUNCTIONS)
        entry_points.write_text(entry_points.read_text() + judges)
        yield Toys(tmp_path_factory.mktemp("toys"), services)


FIELDS = dict(every_field(RunSpec))


def is_plain_group(name: str) -> bool:
    """A group that is always there: it does what its fields do."""
    return FIELDS[name].annotation is group_in(FIELDS[name].annotation)


TO_BE_SHOWN = [name for name in FIELDS if not is_plain_group(name)]


def test_every_field_is_shown_in_one_way() -> None:
    ways = Counter([*CASES, *SHOWN_BY])
    assert {name for name, count in ways.items() if count > 1} == set()
    assert set(TO_BE_SHOWN) - set(ways) == set(), "write a case for each new field"
    assert set(ways) - set(TO_BE_SHOWN) == set(), "there is no such field any more"


def test_a_run_made_twice_is_seen_to_be_the_same(toys: Toys, tmp_path: Path) -> None:
    assert views_of_a_run(tmp_path, toys.with_values(), "") == toys.seen(toys.with_values(), "")


@pytest.mark.parametrize("name", list(CASES))
def test_another_value_makes_a_difference(toys: Toys, name: str) -> None:
    case = CASES[name]
    base = toys.with_values(case.base)
    other = toys.with_values(case.base, {name: case.value}, case.along)
    before, after = toys.seen(base, case.fault), toys.seen(other, case.fault)
    differing = {view for view in before if before[view] != after[view]}
    assert case.shows in differing, f"only {sorted(differing)} differ; ends: {before['end']}, {after['end']}"
    # A value that is refused would differ in everything, and show nothing of what the field does.
    assert ("end" in differing) == (case.shows == "end"), f"ends: {before['end']}, {after['end']}"


@pytest.mark.parametrize(("name", "value"), [("name", "another"), ("resources.priority", 5)])
def test_what_is_shown_elsewhere_makes_no_difference_to_a_run(toys: Toys, name: str, value: Any) -> None:
    assert toys.seen(toys.with_values({name: value}), "") == toys.seen(toys.with_values(), "")


@pytest.mark.parametrize("name", list(SHOWN_BY))
def test_the_test_that_shows_a_field_elsewhere_is_there(name: str) -> None:
    path, _, function = SHOWN_BY[name].partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
