"""What is trained on: a policy of random weights, its tokenizer, a small reward model, prompts, and the spec."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

WORDS = ("the", "film", "is", "a", "good", "bad", "slow", "and", "long", "story", "of", "two", "old", "friends")


@dataclass(frozen=True)
class Case:
    """Sizes of model and run."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    vocabulary: int
    batch_size: int
    max_new_tokens: int
    token_budget: int
    iterations: int
    gpu_memory_utilization: float = 0.3


# Half a billion weights, the shape of Qwen2's smallest.
DEFAULT = Case(896, 4864, 24, 14, 2, 151_936, batch_size=128, max_new_tokens=256, token_budget=16_384, iterations=4)
SMALL = Case(512, 2048, 8, 8, 2, 32_000, batch_size=32, max_new_tokens=64, token_budget=8192, iterations=2)


def write_case(case: Case, folder: Path) -> None:
    """Write `policy`, `reward_model` and `prompts.jsonl` to the folder."""
    tokenizer = _tokenizer()
    ends: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    torch.manual_seed(0)
    policy = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=case.vocabulary,
            hidden_size=case.hidden,
            intermediate_size=case.intermediate,
            num_hidden_layers=case.layers,
            num_attention_heads=case.heads,
            num_key_value_heads=case.key_value_heads,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            **ends,
        )
    )
    policy.to(torch.bfloat16).save_pretrained(folder / "policy")
    reward = LlamaForSequenceClassification(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=4,
            max_position_embeddings=2048,
            num_labels=1,
            **ends,
        )
    )
    reward.save_pretrained(folder / "reward_model")
    for name in ("policy", "reward_model"):
        tokenizer.save_pretrained(folder / name)
    rows = [{"prompt": " ".join(WORDS[number * step % len(WORDS)] for step in range(1, 9))} for number in range(256)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def spec_of(case: Case, folder: Path, engine: str) -> dict[str, Any]:
    """The raw spec of a run with that train engine, on one GPU that it shares with vLLM."""
    ranks = {"engine": "deepspeed", "ranks": 1, "zero_stage": 1} if engine == "deepspeed" else {"engine": engine}
    return {
        "name": f"gpu-{engine}",
        "seed": 1,
        "iterations": case.iterations,
        "policy": {"model": str(folder / "policy"), "dtype": "bfloat16"},
        "data": {"prompts": str(folder / "prompts.jsonl"), "held_out": None, "max_prompt_tokens": 64},
        "rollout": {
            "engine": "vllm",
            "vllm": {"gpu_memory_utilization": case.gpu_memory_utilization},
            "batch_size": case.batch_size,
            "max_new_tokens": case.max_new_tokens,
        },
        "reward": {"sources": [{"kind": "sequence_classifier", "model": str(folder / "reward_model")}]},
        # A rate that moves weights by more than bfloat16 rounds away, in every iteration.
        "update": {"learning_rate": 1e-4, "minibatches": 4, "epochs": 2, "token_budget": case.token_budget},
        "training": ranks,
        "checkpoints": {"every": case.iterations},
        "resources": {"gpus": 1},
    }


def remove_case(folder: Path) -> None:
    """Its folder and all in it: a checkpoint of the default case alone is 7 GB."""
    shutil.rmtree(folder, ignore_errors=True)


def _tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and nothing learned: ids beyond them decode to nothing, which is all the same to speed."""
    names = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    ends = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends)  # type: ignore[no-untyped-call]
