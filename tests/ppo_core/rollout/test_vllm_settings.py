"""What vLLM is started with, and what is refused before any process is started."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ppo_core.errors import DataError
from ppo_core.models.policy import PolicyModel
from ppo_core.rollout.vllm_settings import environment_of, settings_of
from tests.ppo_core.rollout.engine_contract import contract_policy
from tests.ppo_core.rollout.vllm_engines import started_engine, vllm_config
from tests.ppo_core.tiny_models import tiny_model


def settings(policy: PolicyModel, options: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    config = vllm_config(options, **changes)
    return settings_of(policy, config, folder=Path("m"), max_prompt_tokens=20, transfer="t", extension="e")["engine"]


def test_nothing_is_left_to_the_models_folder() -> None:
    found = settings(contract_policy())
    assert found["generation_config"] == "vllm"
    assert found["logprobs_mode"] == "processed_logprobs"
    assert found["dtype"] == "float32"
    assert found["max_num_seqs"] == 32
    assert found["kv_cache_memory_bytes"] == 2**26


@pytest.mark.parametrize(
    ("option", "value", "setting"),
    [
        ("tensor_parallel", 2, "tensor_parallel_size"),
        ("max_rows", 7, "max_num_seqs"),
        ("gpu_memory_utilization", 0.5, "gpu_memory_utilization"),
    ],
)
def test_an_option_reaches_the_engine_on_a_gpu(option: str, value: float, setting: str) -> None:
    on_gpu: Any = SimpleNamespace(model=contract_policy().model, device=torch.device("cuda"))
    assert settings(on_gpu)[setting] != value
    assert settings(on_gpu, options={option: value})[setting] == value


def test_the_cache_of_an_engine_on_a_processor_is_as_large_as_asked() -> None:
    assert settings(contract_policy(), options={"kv_cache_gib": 0.5})["kv_cache_memory_bytes"] == 2**29


def test_prompt_response_and_canary_fit_and_the_context_is_not_exceeded() -> None:
    assert settings(contract_policy(), max_new_tokens=40)["max_model_len"] == 60
    assert settings(contract_policy(), max_new_tokens=2)["max_model_len"] == 35
    assert settings(contract_policy(), max_new_tokens=500)["max_model_len"] == 128


def test_a_rank_is_not_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "5", "OMP_NUM_THREADS": "3"}.items():
        monkeypatch.setenv(name, value)
    found = environment_of(torch.device("cpu"), 2, Path("t"))
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT"} & found.keys()
    assert (found["OMP_NUM_THREADS"], found["VLLM_ENABLE_V1_MULTIPROCESSING"]) == ("3", "0")
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert int(environment_of(torch.device("cpu"), 64, Path("t"))["OMP_NUM_THREADS"]) >= 1


def test_heads_that_vllm_cannot_run_on_a_processor_are_refused_by_number(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="attention heads have 8 dimensions; vLLM on a processor takes 32, 64"):
        started_engine(PolicyModel(tiny_model()), tmp_path, vllm_config())
    assert not list(tmp_path.iterdir())


def test_a_bias_on_the_output_embedding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a PhiForCausalLM has a bias on its output embedding, which vLLM"):
        started_engine(PolicyModel(tiny_model("phi", hidden_size=128)), tmp_path, vllm_config())


def test_without_vllm_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else found(name))
    with pytest.raises(DataError, match="vLLM is not installed here") as error:
        started_engine(contract_policy(), tmp_path, vllm_config())
    assert "requirements/engines.txt" in error.value.hint


def test_the_trainers_side_does_not_load_vllm() -> None:
    code = "import sys, ppo_core.rollout.vllm_engine; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
