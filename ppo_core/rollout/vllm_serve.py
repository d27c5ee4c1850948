"""Starts a vLLM server for trainers to speak to by its address: vLLM's own server with what they rely on switched on.

    python -m ppo_core.rollout.vllm_serve MODEL --max-model-len 1024 --dtype bfloat16 --port 8000 [MORE]

MODEL is the policy's folder: its `config.json` is read, no weights, which come with a trainer's first sync. MORE are
vLLM's own options; where one is given twice the last one counts. Whoever reaches the port can change the weights and
read what is generated: it belongs on a private network, and listens on this machine alone unless `--host` is given.
"""

from __future__ import annotations

import json
import os
import sys

import torch

from ppo_core.rollout.vllm_settings import BLOCK_TOKENS, NCCL, SHARED_MEMORY

EXTENSION = "ppo_core.rollout.vllm_worker.WeightReceiver"


def options_of(model: str, on_cpu: bool) -> list[str]:
    """What a server of this model is started with, before whatever its operator adds."""
    on_device = ["--enforce-eager", f"--block-size={BLOCK_TOKENS}"] if on_cpu else []
    return [
        f"--model={model}",
        "--host=127.0.0.1",
        "--load-format=dummy",  # The first sync brings the weights.
        "--skip-tokenizer-init",  # Ids go in and out.
        "--generation-config=vllm",  # nothing from the model's folder
        "--seed=0",  # Every request has its own.
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
        "--no-async-scheduling",
        "--logprobs-mode=processed_logprobs",
        f"--weight-transfer-config={json.dumps({'backend': SHARED_MEMORY if on_cpu else NCCL})}",
        f"--worker-extension-cls={EXTENSION}",
        "--uvicorn-log-level=warning",  # One line a request, and each row is one.
        *on_device,
    ]


def environment_of_server(on_cpu: bool) -> dict[str, str]:
    """What vLLM reads from the environment alone."""
    found = {
        "VLLM_SERVER_DEV_MODE": "1",  # The routes by which weights come.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if on_cpu:
        found |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1", "VLLM_HOST_IP": "127.0.0.1"}
    return found


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    on_cpu = not torch.cuda.is_available()
    os.environ.update(environment_of_server(on_cpu))
    sys.argv[1:] = [*options_of(sys.argv[1], on_cpu), *sys.argv[2:]]
    # Not by vLLM's command line: it asks for the version of a package `vllm`, and its build for processors has another
    # name.
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


if __name__ == "__main__":
    main()
