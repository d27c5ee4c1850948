"""Whoever waits for scores is not waited for: a stop that is asked meanwhile ends every kind of scorer in a moment."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ppo_core.control import Interrupted
from ppo_core.ranks import ALONE
from ppo_core.scoring import sequence_classifier
from ppo_core.scoring.combine import Reward
from ppo_core.scoring.http_service import HttpService
from ppo_core.scoring.python_function import PythonFunction
from ppo_core.scoring.sequence_classifier import SequenceClassifier
from ppo_core.scoring.shared import SharedReward
from ppo_core.scoring.source import RewardSource
from ppo_core.spec.scorers import REWARD_FUNCTIONS
from tests.ppo_core.scoring.live_service import Said, live_service
from tests.ppo_core.scoring.registered import register
from tests.ppo_core.toy_run import make_toy

PATIENCE_S = 300.0


def stop_after(seconds: float) -> Callable[[], None]:
    asked_at = time.monotonic() + seconds

    def check() -> None:
        if time.monotonic() >= asked_at:
            raise Interrupted

    return check


def interrupted(source: RewardSource, *responses: str) -> None:
    """The source, as every rank of a run asks it, gives up long before its own deadline."""
    reward = SharedReward(lambda: Reward(((source, 1.0),), max_invalid_share=1.0), ALONE)
    began = time.monotonic()
    with pytest.raises(Interrupted):
        reward.score(["film"] * len(responses), responses, stop_after(0.3))
    assert time.monotonic() - began < PATIENCE_S / 5


def test_a_service_that_says_nothing() -> None:
    with live_service(lambda request: Said(hangs=bool(request["responses"][0]))) as service:
        environment = {"PPO_REWARD_HOSTS": "127.0.0.1"}
        source = HttpService.of(service.url, 1, 0, PATIENCE_S, environment)
        interrupted(source, "a", "b", "c")
        source.close()


def test_a_function_that_does_not_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(tmp_path, monkeypatch, REWARD_FUNCTIONS)
    source = PythonFunction(REWARD_FUNCTIONS, "by_text", PATIENCE_S)
    interrupted(source, " a", " sleep")
    assert source.num_processes == 1  # the one that sleeps was ended
    assert source.score(["film"], [" a"]) == [6.0]
    source.close()


def test_a_reward_model_with_batches_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_classifier, "BATCH_TOKENS", 1)  # a pass for each text
    source = SequenceClassifier(make_toy(tmp_path)["reward"]["sources"][0]["model"], PATIENCE_S)
    left = iter(range(3))

    def check() -> None:
        if next(left) == 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        source.score(["film"] * 9, [" good"] * 9, check)
