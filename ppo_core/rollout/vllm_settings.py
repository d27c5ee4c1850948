"""What a vLLM process is started with: its settings, every one by name, and its environment.

It loads no vLLM, so that the trainer need not.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from ppo_core.errors import DataError
from ppo_core.models.policy import PolicyModel
from ppo_core.rollout.weights import PROBE_LENGTHS
from ppo_core.spec.groups import RolloutConfig

# Ways on which vLLM takes weights in: one of ours, its own for a GPU that trainer and engine share, and for others.
SHARED_MEMORY = "ppo_shared_memory"
CUDA_IPC = "ipc"
NCCL = "nccl"
# What a server's model must have in common with the policy, by the names of its `config.json`.
SHAPE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
# Of the key-value cache, tokens; the smallest that vLLM's attention on a processor takes.
BLOCK_TOKENS = 32
# Long enough that its first block is cached: what is read from there must be of the weights that are held.
CANARY_TOKENS = BLOCK_TOKENS + 2
# Tokens of one step of the engine; every row under way has at least one in it.
STEP_TOKENS = 4096
# Of the engine's attention on a processor; it finds out only when it is first used.
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# A trainer's ranks are not the engine's.
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def settings_of(
    policy: PolicyModel,
    config: RolloutConfig,
    *,
    folder: Path | None,
    max_prompt_tokens: int,
    transfer: str,
    extension: str,
) -> dict[str, Any]:
    """The settings of one engine, as JSON.

    Args:
        policy: gives shape, precision and device; no weights are taken from it.
        config: the spec's.
        folder: holds the model's `config.json` and its tokenizer; None: a server has that.
        max_prompt_tokens: longest prompt.
        transfer: the way on which weights come.
        extension: full name of the class that is mixed into vLLM's worker.

    Raises:
        DataError: vLLM cannot run this model on this device.
    """
    shape = policy.model.config.get_text_config()
    context = getattr(shape, "max_position_embeddings", None) or sys.maxsize
    num_tokens: int = policy.model.get_input_embeddings().num_embeddings
    if getattr(policy.model.get_output_embeddings(), "bias", None) is not None:
        raise DataError(
            f"a {type(policy.model).__name__} has a bias on its output embedding, which vLLM 0.32 loses when weights "
            "are loaded anew",
            hint="Set rollout.engine to transformers.",
        )
    on_cpu = policy.device.type == "cpu"
    if on_cpu:
        _refuse_odd_heads(shape)
    longest = max(max_prompt_tokens + config.max_new_tokens, 2 * max(PROBE_LENGTHS) + 1, CANARY_TOKENS + 1)
    canary = torch.arange(min(CANARY_TOKENS, context - 1)) * 7907 + 13
    options = config.vllm
    memory = (
        {"kv_cache_memory_bytes": int(options.kv_cache_gib * 2**30)}
        if on_cpu
        else {"gpu_memory_utilization": options.gpu_memory_utilization, "enable_sleep_mode": True}
    )
    return {
        "engine": {
            "model": None if folder is None else str(folder),
            "load_format": "dummy",  # The first sync brings the weights.
            "skip_tokenizer_init": True,
            "generation_config": "vllm",  # nothing from the model's folder
            "dtype": str(policy.model.dtype).removeprefix("torch."),
            "seed": 0,  # Every request has its own.
            "max_model_len": min(longest, context),
            "max_num_seqs": options.max_rows,
            "max_num_batched_tokens": max(STEP_TOKENS, options.max_rows),
            "block_size": BLOCK_TOKENS,
            "enable_prefix_caching": True,
            "tensor_parallel_size": options.tensor_parallel,
            "distributed_executor_backend": "uni" if options.tensor_parallel == 1 else "mp",
            "async_scheduling": False,
            "enforce_eager": on_cpu,
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            "weight_transfer_config": {"backend": transfer},
            "worker_extension_cls": extension,
            **memory,
        },
        "canary": (canary % num_tokens).tolist(),
        # A model that was made and never saved does not name its class.
        "shape": shape_of(policy.model.config, [type(policy.model).__name__]),
    }


def shape_of(config: Any, architectures: list[str] | None = None) -> dict[str, Any]:
    """Of a model's configuration, what tells whether two of them can have the same weights."""
    text = config.get_text_config()
    sizes = {name: getattr(text, name, None) for name in SHAPE_FIELDS}
    return {"architectures": config.architectures or architectures, **sizes}


def environment_of(device: torch.device, num_replicas: int, folder: Path) -> dict[str, str]:
    """The environment of one of `num_replicas` engines beside this process; `folder` is for their temporary files."""
    found = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    found.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // num_replicas)))
    found |= {
        # It finds what this process finds, wherever it was started.
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        # Engine, scheduler and worker are one process: one to watch, and one to kill.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if device.type == "cpu":
        found["TMPDIR"] = str(folder)  # Not on a GPU: what is compiled there is meant to be found again.
        found["TORCHDYNAMO_DISABLE"] = "1"  # It would compile C++ for a sum of ranks, which takes half a minute.
    return found


def _refuse_odd_heads(shape: Any) -> None:
    head_size = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    if head_size not in CPU_HEAD_SIZES:
        sizes = ", ".join(str(size) for size in CPU_HEAD_SIZES)
        raise DataError(
            f"the policy's attention heads have {head_size} dimensions; vLLM on a processor takes {sizes}",
            hint="Set rollout.engine to transformers, or take a model with other heads.",
        )
