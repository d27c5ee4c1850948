"""Real vLLM engines for tests: small, on a processor, with the contract's policy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ppo_core.models.policy import PolicyModel
from ppo_core.rollout.vllm_engine import VLLMEngine
from ppo_core.rollout.weights import PolicyWeights, probe_of
from ppo_core.spec.engines import VLLMConfig
from ppo_core.spec.groups import RolloutConfig
from tests.ppo_core.rollout.engine_contract import rollout_config
from tests.ppo_core.tiny_models import tiny_tokenizer

# Names the file that says which fault an engine has, where it has any; see `vllm_faults`.
FAULT_FILE = "PPO_TEST_ENGINE_FAULT"
# Names the file in which an engine that is like one on a GPU notes what was called; see `vllm_gpu_like`.
CALLS_FILE = "PPO_TEST_ENGINE_CALLS"
SMALL = {"kv_cache_gib": 0.0625, "max_rows": 32}


def vllm_config(options: dict[str, Any] | None = None, **changes: Any) -> RolloutConfig:
    return rollout_config(engine="vllm", vllm=VLLMConfig(**{**SMALL, **(options or {})}), **changes)


def started_engine(policy: PolicyModel, logs: Path, config: RolloutConfig, **more: Any) -> VLLMEngine:
    """An engine that holds no weights yet."""
    return VLLMEngine(policy, tiny_tokenizer(), config, max_prompt_tokens=32, logs=logs, **more)


def synced(engine: VLLMEngine, policy: PolicyModel, version: int = 4) -> VLLMEngine:
    engine.sync_weights(PolicyWeights(policy), probe_of(policy), version)
    return engine


def moved(policy: PolicyModel, by: float = 0.02) -> PolicyModel:
    """The same policy, each of its weights a little elsewhere."""
    with torch.no_grad():
        for number, parameter in enumerate(policy.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * by)
    return policy


def is_gone(pid: int) -> bool:
    """Whether no process has this number, or only one that has ended and was not yet collected."""
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return True


def group_of(pid: int) -> list[int]:
    """Living processes of the group that the process `pid` leads."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and not is_gone(int(entry.name)):
            try:
                if os.getpgid(int(entry.name)) == pid:
                    found.append(int(entry.name))
            except ProcessLookupError:
                continue
    return found
