"""The group of a run spec that belongs to the vLLM engine."""

from __future__ import annotations

from ppo_core.spec.setting import Group, setting

# vLLM raises what is lower to this without an error, and refuses what is higher.
VLLM_TEMPERATURES = (0.01, 2.0)


class VLLMConfig(Group):
    """Processes that run vLLM beside the trainer, or beside each of its ranks."""

    replicas: int = setting(
        1, "rollback", "Engines among which rows are dealt out; each is a process with weights of its own.", ge=1, le=64
    )
    tensor_parallel: int = setting(1, "rollback", "GPUs over which each engine spreads the model.", ge=1, le=64)
    max_rows: int = setting(
        256,
        "rollback",
        "Responses that an engine generates at once; halved by itself when memory runs out.",
        ge=1,
        le=8192,
    )
    gpu_memory_utilization: float = setting(
        0.3,
        "rollback",
        "Share of its GPU's whole memory that an engine takes for weights, passes and key-value cache; on a GPU only.",
        gt=0,
        le=0.95,
    )
    kv_cache_gib: float = setting(
        1.0, "rollback", "Memory of an engine's key-value cache; on a processor only.", gt=0, le=4096
    )
    timeout_s: float = setting(
        600.0,
        "rollback",
        "An engine that says nothing for so long while it generates or takes over weights is ended, and the run fails.",
        ge=1,
        le=86400,
    )
