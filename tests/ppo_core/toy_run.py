"""A whole run in miniature: a random policy, a random reward model, prompts, and a spec that trains in a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForSequenceClassification

from ppo_core.rundir import Event, SegmentDir, SegmentStart, create_segment, read_journal
from tests.ppo_core.tiny_models import tiny_config, tiny_model, tiny_tokenizer

TOKENS = 300  # of the tiny tokenizer


def make_toy(folder: Path, num_prompts: int = 24) -> dict[str, Any]:
    """Write policy, reward model and prompts to `folder`; return a raw spec that uses them."""
    tokenizer = tiny_tokenizer()
    # Spread less than the other tiny models: answers of some length, and a ratio that moves slowly.
    model = tiny_model("llama", vocab_size=TOKENS, initializer_range=0.05)
    model.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    torch.manual_seed(1)
    reward = LlamaForSequenceClassification(tiny_config("llama", vocab_size=TOKENS, num_labels=1))
    reward.save_pretrained(folder / "reward_model")
    tokenizer.save_pretrained(folder / "reward_model")
    words = ["the", "film", "is", "good", "bad", "a", "and"]
    for name, count in (("train", num_prompts), ("held_out", 6)):
        rows = [{"prompt": f"{words[i % 7]} {words[(i * 3 + 1) % 7]} {i} {name}"} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "name": "toy",
        "seed": 1,
        "iterations": 3,
        "policy": {"model": str(folder / "policy")},
        "data": {
            "prompts": str(folder / "train.jsonl"),
            "held_out": str(folder / "held_out.jsonl"),
            "max_prompt_tokens": 32,
        },
        "rollout": {"batch_size": 8, "max_new_tokens": 8},
        "reward": {"sources": [{"kind": "sequence_classifier", "model": str(folder / "reward_model")}]},
        "update": {"learning_rate": 1e-3, "minibatches": 2},
        "gate": {"every": 2, "prompts": 4},
        "evaluation": {"every": 2, "prompts": 4},
        "samples": {"per_iteration": 2},
        "checkpoints": {"every": 2},
        "preflight": {"enabled": False},
    }


def other_classifier(folder: Path, seed: int = 7) -> Path:
    """Write a sequence classifier of the toy's shape and of other weights to `folder`: a judge, or another reward."""
    torch.manual_seed(seed)
    LlamaForSequenceClassification(tiny_config("llama", vocab_size=TOKENS, num_labels=1)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def toy_segment(run_dir: Path, spec: dict[str, Any], number: int = 1, checkpoint: str | None = None) -> SegmentDir:
    return create_segment(run_dir, SegmentStart("toy", number, spec, checkpoint))


def journal(segment: SegmentDir, type: str | None = None) -> list[Event]:
    """All events of a segment, or those of one type."""
    events, _ = read_journal(segment.journal)
    return [event for event in events if type is None or event.type == type]


def timeless(metrics: dict[str, Any]) -> dict[str, Any]:
    """Metrics without those that depend on the machine's mood: times, throughput, memory, share of the limit."""
    return {
        name: value
        for name, value in metrics.items()
        if name.split("/")[0] not in ("time", "throughput", "memory", "limit")
    }
