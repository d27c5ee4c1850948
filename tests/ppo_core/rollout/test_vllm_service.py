"""A real vLLM server by its address keeps the contract of rollout engines, and its faults are caught by name."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from ppo_core.errors import DataError, EngineLostError, EngineTimeoutError, WeightSyncError
from ppo_core.main import run_segment
from ppo_core.models.policy import PolicyModel
from ppo_core.rollout.engine import RolloutEngine
from ppo_core.rollout.transformers_engine import TransformersEngine
from ppo_core.rollout.vllm_engine import VLLMEngine
from ppo_core.rollout.weights import PolicyWeights, probe_of
from ppo_core.rundir import ExitCode
from ppo_core.spec.engines import VLLMConfig
from ppo_core.spec.groups import RolloutConfig
from tests.ppo_core.rollout.engine_contract import PROMPTS, SEEDS, SamplingContract, contract_policy, rollout_config
from tests.ppo_core.rollout.vllm_engines import FAULT_FILE, moved, started_engine, synced, vllm_config
from tests.ppo_core.rollout.vllm_servers import MAX_MODEL_LEN, LiveServer
from tests.ppo_core.tiny_models import tiny_model, tiny_tokenizer
from tests.ppo_core.toy_run import TOKENS, journal, make_toy, toy_segment

pytestmark = pytest.mark.engines

TIMEOUT_S = 5.0
# Rows for some seconds of generation.
MANY = 3000


@dataclass(frozen=True)
class Served:
    server: LiveServer
    engine: VLLMEngine
    process: VLLMEngine  #: of the run's own
    fault: Path  #: says which fault the server has from the next sync on


def server_config(url: str, **changes: Any) -> RolloutConfig:
    servers = VLLMConfig(servers=[url], max_rows=32, timeout_s=TIMEOUT_S)
    return rollout_config(engine="vllm", vllm=servers, **changes)


@pytest.fixture(scope="module", autouse=True)
def _allowed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PPO_ENGINE_HOSTS", "127.0.0.1")
        yield


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of the contract's policy, which the toy's has the shape of."""
    folder = tmp_path_factory.mktemp("server")
    fault = folder / "fault"
    extension = "tests.ppo_core.rollout.vllm_faults.FaultyReceiver"
    server = LiveServer(contract_policy(), folder, extension, {FAULT_FILE: str(fault)})
    try:
        process = started_engine(contract_policy(), folder, vllm_config())  # while the server starts
        server.wait()
        engine = started_engine(contract_policy(), folder, server_config(server.url, max_new_tokens=48))
        yield Served(server, engine, process, fault)
        for each in (engine, engine, process):
            each.close()
    finally:
        server.stop()


def configured(engine: VLLMEngine, config: RolloutConfig) -> VLLMEngine:
    """The same server under other settings of sampling: they are sent with every request."""
    engine._config = vllm_config(**config.model_dump(exclude={"engine", "vllm"}))
    engine._stop_ids = [2, *config.stop_ids]
    return engine


class TestContract(SamplingContract):
    policy = contract_policy()

    @pytest.fixture(autouse=True)
    def _take(self, served: Served) -> None:
        self.engine = served.engine

    def make(self, config: RolloutConfig) -> RolloutEngine:
        return synced(configured(self.engine, config), self.policy)


def test_its_responses_are_those_of_a_process_of_the_runs_own_and_rows_are_dealt_out_among_both(
    served: Served,
) -> None:
    policy, prompts, seeds = contract_policy(), PROMPTS * 3, list(range(12))
    server = synced(configured(served.engine, rollout_config()), policy).generate(prompts, seeds=seeds)
    both = synced(served.process, policy)
    process = both.generate(prompts, seeds=seeds)
    assert [one.ids for one in server] == [one.ids for one in process]
    assert [one.finish_reason for one in server] == [one.finish_reason for one in process]
    both._replicas = [*both._replicas, *served.engine._replicas]
    try:
        assert [one.ids for one in synced(both, policy, 5).generate(prompts, seeds=seeds)] == [
            one.ids for one in server
        ]
    finally:
        both._replicas = both._replicas[:1]
        both.close()


def test_greedy_responses_are_those_of_the_transformers_engine(served: Served) -> None:
    policy = contract_policy()
    with torch.no_grad():  # Wide apart: at the lowest temperature nothing is left to chance.
        policy.model.get_input_embeddings().weight.mul_(50)
    config = rollout_config(temperature=0.01, max_new_tokens=24)
    theirs = TransformersEngine(policy, tiny_tokenizer(), config).generate(PROMPTS, seeds=SEEDS)
    ours = synced(configured(served.engine, config), policy).generate(PROMPTS, seeds=SEEDS)
    assert [one.ids for one in ours] == [one.ids for one in theirs]
    assert [one.finish_reason for one in ours] == [one.finish_reason for one in theirs]


def test_a_stop_in_mid_generation_is_honoured_at_once(served: Served) -> None:
    class Stop(Exception):
        pass

    began = time.monotonic()

    def check() -> None:
        if time.monotonic() - began > 0.3:
            raise Stop

    engine = synced(configured(served.engine, rollout_config(max_new_tokens=48)), contract_policy())
    with pytest.raises(Stop):
        engine.generate(PROMPTS * 200, seeds=list(range(800)), check=check)
    assert time.monotonic() - began < 3
    assert synced(engine, contract_policy()).version == 4  # Nothing is left that holds the prefix cache.


@pytest.mark.parametrize(
    ("fault", "message", "is_paused"),
    [
        ("ignores", r"logprobs of the probe by vLLM server http://127\.0\.0\.1:\d+ differ from the trainer's", False),
        ("half", r"of the model's own did not arrive whole", True),
        ("wrong bits", r"sent weights of digest [0-9a-f]{64}, vLLM server http\S+ received [0-9a-f]{64}", False),
    ],
)
def test_a_sync_that_went_wrong_is_caught_and_nothing_is_generated_after_it(
    served: Served, fault: str, message: str, is_paused: bool
) -> None:
    policy, engine = contract_policy(), configured(served.engine, rollout_config())
    synced(engine, policy, 1)
    served.fault.write_text(fault)
    moved(policy)
    try:
        with pytest.raises(WeightSyncError, match=message):
            engine.sync_weights(PolicyWeights(policy), probe_of(policy), 2)
        with pytest.raises(WeightSyncError, match="asked for policy version 1, but the engine holds"):
            engine.generate(PROMPTS, seeds=SEEDS)
        # Half loaded it generates for nobody.
        assert httpx.get(f"{served.server.url}/is_paused", trust_env=False).json() == {"is_paused": is_paused}
    finally:
        served.fault.write_text("")
    assert len(synced(engine, policy, 3).generate(PROMPTS, seeds=SEEDS)) == len(PROMPTS)


def test_a_server_that_another_trainer_has_taken_over_is_found_out(served: Served, tmp_path: Path) -> None:
    first = synced(configured(served.engine, rollout_config()), contract_policy(), 1)
    second = started_engine(contract_policy(), tmp_path, server_config(served.server.url))
    try:
        synced(second, contract_policy(), 1)  # The same weights under the same number.
        with pytest.raises(
            WeightSyncError, match=r"asked for policy version 1, but the engine holds '\w+/1', expected"
        ):
            first.generate(PROMPTS, seeds=SEEDS)
    finally:
        second.close()


def test_a_trainer_that_was_killed_within_a_sync_leaves_a_server_that_the_next_one_can_use(
    served: Served, tmp_path: Path
) -> None:
    killed = started_engine(contract_policy(), tmp_path, server_config(served.server.url))
    other = synced(configured(served.engine, rollout_config()), contract_policy())
    killed._ask_all("begin_update")
    killed.close()
    with pytest.raises(WeightSyncError, match="somebody has paused it, so another trainer may be sending weights"):
        other.generate(PROMPTS, seeds=SEEDS)  # It would keep the requests for ever.
    assert httpx.get(f"{served.server.url}/is_paused", trust_env=False).json() == {"is_paused": True}
    engine = synced(configured(served.engine, rollout_config()), contract_policy())
    assert len(engine.generate(PROMPTS, seeds=SEEDS)) == len(PROMPTS)


@pytest.mark.parametrize(
    ("policy", "changes", "message"),
    [
        (
            PolicyModel(tiny_model("qwen3", vocab_size=300, head_dim=32)),
            {},
            r"has architectures \['LlamaForCausalLM'\], and this run needs \['Qwen3ForCausalLM'\]",
        ),
        (
            PolicyModel(tiny_model("llama", vocab_size=301, head_dim=32)),
            {},
            "has vocab_size 300, and this run needs 301",
        ),
        (contract_policy().bfloat16(), {}, "has dtype 'float32', and this run needs 'bfloat16'"),
        (
            PolicyModel(tiny_model("llama", vocab_size=300, head_dim=32, max_position_embeddings=4096)),
            {"max_new_tokens": 500},
            rf"takes {MAX_MODEL_LEN} tokens of prompt and response, and this run needs 532",
        ),
    ],
)
def test_a_server_of_another_model_is_refused(
    served: Served, tmp_path: Path, policy: PolicyModel, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message) as error:
        started_engine(policy, tmp_path, server_config(served.server.url, **changes))
    assert "vllm_serve" in error.value.hint or "--max-model-len 532" in error.value.hint


def test_a_whole_run_with_a_server(served: Served, tmp_path: Path) -> None:
    spec = make_toy(tmp_path)
    policy = tiny_model("llama", vocab_size=TOKENS, head_dim=32, max_position_embeddings=128, initializer_range=0.05)
    policy.save_pretrained(tmp_path / "policy")
    vllm = {"servers": [served.server.url], "max_rows": 32, "timeout_s": TIMEOUT_S}
    spec |= {
        "iterations": 3,
        "update": {"learning_rate": 3e-3, "minibatches": 2},
        "rollout": {**spec["rollout"], "engine": "vllm", "vllm": vllm},
    }
    segment = toy_segment(tmp_path / "run", spec)
    assert run_segment(segment, token=1, attempt=1) == ExitCode.DONE
    told = [event for event in journal(segment, "metrics") if "rollout/engine_gap_max" in event.payload]
    assert [event.iteration for event in told] == [1, 2, 3]
    assert max(event.payload["rollout/engine_gap_max"] for event in told) < 1e-4
    synced(served.engine, contract_policy())  # The run has let go of it.


def test_a_server_that_hangs_is_named_at_the_deadline(served: Served) -> None:
    engine = synced(configured(served.engine, rollout_config(max_new_tokens=48)), contract_policy())
    threading.Timer(0.5, os.killpg, (served.server.pid, signal.SIGSTOP)).start()
    began = time.monotonic()
    try:
        with pytest.raises(
            EngineTimeoutError, match=rf"http://127\S+ did not answer /weight_info within {TIMEOUT_S:g} s"
        ):
            engine.generate([PROMPTS[0]] * MANY, seeds=list(range(MANY)))
        assert time.monotonic() - began < TIMEOUT_S + 4
    finally:
        os.killpg(served.server.pid, signal.SIGCONT)
    assert len(synced(engine, contract_policy()).generate(PROMPTS, seeds=SEEDS)) == len(PROMPTS)


def test_a_server_that_is_killed_in_mid_generation_is_named_within_seconds(served: Served) -> None:
    engine = synced(configured(served.engine, rollout_config(max_new_tokens=48)), contract_policy())
    threading.Timer(1.0, os.kill, (served.server.pid, signal.SIGKILL)).start()
    began = time.monotonic()
    with pytest.raises(EngineLostError, match=rf"vLLM server {served.server.url} is gone"):
        engine.generate([PROMPTS[0]] * MANY, seeds=list(range(MANY)))
    assert 1.0 <= time.monotonic() - began < 4.0
    with pytest.raises(EngineLostError, match="is gone, or was never there"):
        engine.generate(PROMPTS, seeds=SEEDS)


class Refusing(BaseHTTPRequestHandler):
    """Answers as a server that has no routes for development: 404."""

    def do_POST(self) -> None:
        self.send_error(404)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_a_server_without_the_routes_for_weights_is_refused(tmp_path: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(DataError, match="started without VLLM_SERVER_DEV_MODE=1") as error:
            started_engine(contract_policy(), tmp_path, server_config(f"http://127.0.0.1:{server.server_port}"))
        server.shutdown()
    assert "python -m ppo_core.rollout.vllm_serve" in error.value.hint


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineLostError, match=r"vLLM server http://127\.0\.0\.1:9 is gone, or was never there"):
        started_engine(contract_policy(), tmp_path, server_config("http://127.0.0.1:9"))


def test_a_host_that_is_not_allowed_is_not_spoken_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"host '10.1.2.3', port 8000, is not allowed here; .* PPO_ENGINE_HOSTS"):
        started_engine(contract_policy(), tmp_path, server_config("http://10.1.2.3:8000"))
    monkeypatch.setenv("PPO_ENGINE_HOSTS", "localhost")
    with pytest.raises(DataError, match=r"'localhost' stands for (127\.0\.0\.1|::1), which PPO_ENGINE_HOSTS does not"):
        started_engine(contract_policy(), tmp_path, server_config("http://localhost:8000"))
