"""The vLLM process dies, hangs, or outlives nothing: each by name and in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppo_core.errors import EngineLostError, EngineTimeoutError, RolloutError
from ppo_core.rollout.vllm_engine import VLLMEngine
from tests.ppo_core.rollout.engine_contract import PROMPTS, SEEDS, contract_policy
from tests.ppo_core.rollout.vllm_engines import group_of, is_gone, started_engine, synced, vllm_config

pytestmark = pytest.mark.engines

TIMEOUT_S = 4.0
# Rows for some seconds of generation.
MANY = 3000


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMEngine]:
    """Three processes, one for each fault, with equal weights."""
    logs = tmp_path_factory.mktemp("logs")
    config = vllm_config({"replicas": 3, "timeout_s": TIMEOUT_S}, max_new_tokens=48)
    engine = synced(started_engine(contract_policy(), logs, config), contract_policy())
    yield engine
    engine.close()
    assert not [member for pid in engine.pids for member in group_of(pid)]


def alone(engine: VLLMEngine, place: int) -> VLLMEngine:
    """The same engine with one of its processes."""
    one = object.__new__(VLLMEngine)
    one.__dict__ |= engine.__dict__
    one._replicas = [engine._replicas[place]]
    return one


def after(seconds: float, pid: int, number: signal.Signals) -> None:
    threading.Timer(seconds, os.kill, (pid, number)).start()


def test_seeds_decide_whatever_the_number_of_replicas(three: VLLMEngine) -> None:
    prompts, seeds = PROMPTS * 3, list(range(12))
    spread = three.generate(prompts, seeds=seeds)
    assert [one.ids for one in spread] == [one.ids for one in alone(three, 0).generate(prompts, seeds=seeds)]
    assert spread[0].ids != spread[4].ids  # the same prompt under another seed


def test_a_process_that_is_killed_while_idle_is_named_at_the_next_call(three: VLLMEngine) -> None:
    engine = alone(three, 0)
    os.kill(engine.pids[0], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(
        EngineLostError, match=r"vLLM engine 0 \(process \d+\) was killed by SIGKILL; the end of its log"
    ):
        engine.generate(PROMPTS, seeds=SEEDS)
    assert time.monotonic() - began < 1
    with pytest.raises(EngineLostError, match="has ended before"):
        engine.generate(PROMPTS, seeds=SEEDS)


def test_a_process_that_is_killed_in_mid_generation_is_noticed_within_a_second(three: VLLMEngine) -> None:
    engine = alone(three, 1)
    after(1.0, engine.pids[0], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EngineLostError, match="was killed by SIGKILL"):
        engine.generate([PROMPTS[0]] * MANY, seeds=list(range(MANY)))
    assert 1.0 <= time.monotonic() - began < 2.0
    assert not group_of(engine.pids[0])


def test_a_process_that_hangs_is_killed_at_the_deadline(three: VLLMEngine) -> None:
    engine = alone(three, 2)
    after(0.5, engine.pids[0], signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(EngineTimeoutError, match=rf"did not answer within {TIMEOUT_S:g} s and was killed"):
        engine.generate([PROMPTS[0]] * MANY, seeds=list(range(MANY)))
    assert time.monotonic() - began < TIMEOUT_S + 3
    assert not group_of(engine.pids[0])


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match="start: ModuleNotFoundError: No module named 'nowhere'"):
        started_engine(contract_policy(), tmp_path, vllm_config(), extension="nowhere.Nothing")


OWNER = """
import sys, time
from pathlib import Path
from tests.ppo_core.rollout.engine_contract import contract_policy
from tests.ppo_core.rollout.vllm_engines import started_engine, vllm_config
engine = started_engine(contract_policy(), Path(sys.argv[1]), vllm_config())
print(*engine.pids, flush=True)
time.sleep(600)
"""


def test_it_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert owner.stdout is not None
        (pid,) = map(int, owner.stdout.readline().split())
        assert not is_gone(pid)
    finally:
        owner.kill()
        owner.communicate()
    deadline = time.monotonic() + 5
    while not is_gone(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert is_gone(pid)
