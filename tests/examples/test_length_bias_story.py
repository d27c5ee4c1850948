"""The length-bias example's story in small: a toy whose reward pays for length, on a whole platform, within a minute.

The models are tiny and random; reward and judge are functions that a package on the path registers. Everything else is
what the example runs: the trainer, the watch, the gate, the suggestion, and the roll back with it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from examples.length_bias.__main__ import Broken, tell
from examples.length_bias.story import Part, fastest_growth, going_right, going_wrong, parts
from ppo.client import Client
from ppo.local.stack import Stack
from tests.ppo_core.diagnostics.planted import keyword_spec

FUNCTIONS = """
def vowels(response, prompt):
    return 2.0 * any(letter in response for letter in "aeiou")

def paid_by_the_letter(response, prompt):
    return 0.1 * len(response) + vowels(response, prompt)

def vowels_and_brevity(response, prompt):
    return vowels(response, prompt) - 0.02 * max(0, len(response) - 30)

def vowels_and_words(response, prompt):
    return vowels(response, prompt) + 0.02 * len(response)
"""
ENTRY_POINTS = """
[ppo_core.rewards]
letters = story_of_length:paid_by_the_letter
[ppo_core.judges]
brevity = story_of_length:vowels_and_brevity
words = story_of_length:vowels_and_words
"""
NUM_HELD_OUT = 64
WARM_UP = 3  # iterations in which the toy's critic alone learns


def installed(folder: Path) -> Path:
    """A package with the functions and their entry points, as an installer leaves it."""
    info = folder / "story_of_length-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "story_of_length.py").write_text(FUNCTIONS)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: story-of-length\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


def spec_of(folder: Path, judge: str) -> dict[str, Any]:
    """The toy, paid by the letter with next to nothing that holds it, and a gate every 15 iterations."""
    settings: dict[str, dict[str, Any]] = {
        "kl": {"coef": 0.01},
        "reward": {"missing_eos_penalty": 0.0, "sources": [{"kind": "python", "name": "letters"}]},
        "rollout": {"max_new_tokens": 32},
        "update": {"learning_rate": 2e-3, "critic_warmup_iterations": WARM_UP},
        "gate": {
            "every": 15,
            "prompts": NUM_HELD_OUT,
            "judge": {"kind": "python", "name": judge},
            "action": "stop",
        },
        "checkpoints": {"every": 5, "keep_last": 20},
    }
    spec = keyword_spec(folder, 1, 50, settings)
    words = ["the", "film", "is", "good", "bad", "a", "and"]
    rows = [{"prompt": f"{words[n % 7]} {words[(n * 3 + 1) % 7]} {n} held out"} for n in range(NUM_HELD_OUT)]
    held_out = folder / "held_out.jsonl"
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec["data"]["held_out"] = str(held_out)
    return spec


@pytest.fixture
def platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stack whose processes, and this one, find the functions."""
    package = installed(tmp_path / "package")
    monkeypatch.syspath_prepend(str(package))
    paths = os.pathsep.join(filter(None, (str(package), os.environ.get("PYTHONPATH"))))
    env = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    with (
        Stack(tmp_path / "data", port=0, roots=[tmp_path], env=env) as stack,
        Client(stack.url, stack.admin_key) as client,
    ):
        yield client


@pytest.mark.stack
@pytest.mark.timeout(300)
def test_the_run_stops_itself_and_the_suggested_way_back_mends_it(platform: Client, tmp_path: Path) -> None:
    events, suggestion = tell(platform, spec_of(tmp_path, "brevity"))
    assert suggestion["changes"] == {
        "kl.coef": 0.05,
        "reward.missing_eos_penalty": -1.0,
        "reward.length_baseline": "linear",
    }
    first, second = (part for _, part in sorted(parts(events).items()))
    promises = [*going_wrong(first, WARM_UP), *going_right(second, first, WARM_UP)]
    assert [promise.name for promise in promises if not promise.holds] == []


@pytest.mark.stack
@pytest.mark.timeout(300)
def test_a_judge_that_wants_long_answers_lets_the_run_go_on(platform: Client, tmp_path: Path) -> None:
    """The same run; whether length is a fault is the judge's to say."""
    with pytest.raises(Broken, match="succeeded"):
        tell(platform, spec_of(tmp_path, "words"))


def a_part(scores: list[float], raised_at: int | None = None) -> Part:
    """A first part whose answers grow fourfold."""
    num = len(scores)
    rows = {
        at: {
            "reward/score_mean": score,
            "response/length_mean": 10 + 30 * at / num,
            "response/eos_rate": 1 - 0.5 * at / num,
            "kl/ref_sequence": 40.0 * at / num,
        }
        for at, score in enumerate(scores, 1)
    }
    return Part(rows, raised_at)


def test_a_story_told_too_late_breaks_its_promise() -> None:
    """A score of n/10 has made half of its gain at iteration 20 of 40, as means of five around it say at 22."""
    scores = [at / 10 for at in range(1, 41)]
    early, late, never = (going_wrong(a_part(scores, at), 5)[-1] for at in (19, 30, None))
    assert (early.holds, late.holds, never.holds) == (True, False, False)
    assert never.shown == "not told"


def test_a_score_that_falls_for_ten_iterations_is_no_climb() -> None:
    scores = [at / 10 for at in range(1, 21)] + [-3.0] * 10 + [5.0] * 10
    assert not going_wrong(a_part(scores, 10), 5)[0].holds
    assert going_wrong(a_part([at / 10 for at in range(1, 41)], 10), 5)[0].holds


def test_kl_counts_from_a_few_nats_up_and_within_forty_iterations() -> None:
    """From 0.1 to 9 is 9 / 5; from 6 to 30 in 50 iterations is what it does in the best 40 of them."""
    assert fastest_growth([(1, 0.1), (10, 9.0)]) == pytest.approx(1.8)
    assert fastest_growth([(1, 6.0), (51, 30.0)]) == 1.0
