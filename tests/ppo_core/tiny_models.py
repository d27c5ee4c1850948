"""Tiny random models and tokenizers, made from configs: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from ppo_core.models.policy import PolicyModel
from ppo_core.rollout.weights import PolicyWeights, save_policy

VOCABULARY = 64
CONTEXT = 64
FAMILIES = ("llama", "gpt2", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3", "gpt_neox", "phi")


def tiny_config(family: str = "llama", **changes: Any) -> Any:
    """A 2-layer model of 64 ids, its weights spread wide enough that distributions are far from flat."""
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    grouped = {**common, "num_key_value_heads": 2}
    match family:
        case "gpt2":
            gpt2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
            ends = {"initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
            return GPT2Config(**{**gpt2, **ends, **changes})
        case "llama":
            return LlamaConfig(**{**grouped, "tie_word_embeddings": True, **changes})
        case "qwen2":
            return Qwen2Config(**{**grouped, **changes})
        case "qwen3":
            return Qwen3Config(**{**grouped, "head_dim": 8, **changes})
        case "mistral":
            # A window shorter than the test rows, so that it matters.
            return MistralConfig(**{**grouped, "sliding_window": 6, **changes})
        case "gemma":
            return GemmaConfig(**{**grouped, "head_dim": 8, **changes})
        case "gemma2":
            return Gemma2Config(
                **{**grouped, "head_dim": 8, "sliding_window": 6, "final_logit_softcapping": 3.0, **changes}
            )
        case "gemma3":
            # One layer that sees a window, one that sees everything, each with rotations of its own.
            layers = ["sliding_attention", "full_attention"]
            return Gemma3TextConfig(**{**grouped, "head_dim": 8, "sliding_window": 6, "layer_types": layers, **changes})
        case "gpt_neox":
            return GPTNeoXConfig(**{**common, **changes})
        case "phi":
            return PhiConfig(**{**common, **changes})
    raise ValueError(family)


def tiny_model(family: str = "llama", seed: int = 0, attention: str = "sdpa", **changes: Any) -> Any:
    """A causal language model of that family, in evaluation mode."""
    torch.manual_seed(seed)
    config = tiny_config(family, **changes)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def tiny_tokenizer(special: tuple[str, str, str] = ("<pad>", "<s>", "</s>")) -> PreTrainedTokenizerFast:
    """Byte-level pairs over a few sentences: 0 pad, 1 begin, 2 end, then bytes and pairs; any text goes through."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the film is good", "a bad film and a good film"] * 4, trainer)
    pad, bos, eos = special
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos)


def saved(policy: PolicyModel, folder: Path, tokenizer: Any | None = None) -> None:
    """Write a policy as checkpoints hold it."""
    save_policy(policy, PolicyWeights(policy).held(), folder, tokenizer)
