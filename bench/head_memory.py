"""Peak memory of logprobs, entropies and their backward pass for a vocabulary of 32,768.

Ours, through the language-model head in chunks, against the least that the plain way can do: one float32
`log_softmax` over [B, L, V] with autograd, and nothing else kept. Each runs in a process of its own, so that its peak
is the growth of the largest resident size from just before; the gradients of both are compared.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ROWS, LENGTH, VOCABULARY, HIDDEN = 8, 512, 32768, 64
GIB = 2**30


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(way: str, target: Path) -> int:
    """Bytes that the peak grew by; the gradients are left in `target`."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    from ppo_core.models.logits_head import LogitsHead

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config)
    head = LogitsHead.of(model)
    states = torch.randn(ROWS, LENGTH, HIDDEN, requires_grad=True)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH))
    before = peak_bytes()
    if way == "chunks":
        logprobs, entropies = head.logprobs(states.flatten(0, 1), tokens.flatten(), 1.0, "trained")
        assert entropies is not None
        (logprobs.sum() + 0.01 * entropies.sum()).backward()  # type: ignore[no-untyped-call]
    elif way == "log_softmax":
        head(states).log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).sum().backward()
    else:  # the same numbers as the chunks, all at once, to compare gradients with
        whole = head(states).log_softmax(-1)
        entropies = -(whole.exp() * whole).sum(-1)
        (whole.gather(-1, tokens.unsqueeze(-1)).sum() + 0.01 * entropies.sum()).backward()
    grown = peak_bytes() - before
    weight = model.get_output_embeddings().weight
    assert states.grad is not None
    save_file({"states": states.grad, "head": weight.grad}, target)
    return grown


def figures() -> tuple[dict[str, int], float]:
    """Peak growth in bytes by way, and the largest relative difference between chunked and whole gradients."""
    from safetensors.torch import load_file

    grown, gradients = {}, {}
    with tempfile.TemporaryDirectory(prefix="ppo-bench-") as folder:
        for way in ("chunks", "log_softmax", "whole"):
            target = Path(folder) / f"{way}.safetensors"
            done = subprocess.run(
                [sys.executable, "-m", "bench.head_memory", way, str(target)],
                capture_output=True,
                text=True,
                check=True,
            )
            grown[way] = int(done.stdout.split()[-1])
            gradients[way] = load_file(target)
    gaps = [
        float((gradients["chunks"][name] - gradients["whole"][name]).abs().max() / gradients["whole"][name].abs().max())
        for name in ("states", "head")
    ]
    return grown, max(gaps)


def main() -> None:
    grown, gap = figures()
    ours, theirs = grown["chunks"], grown["log_softmax"]
    print(f"{ROWS} rows of {LENGTH} tokens, vocabulary {VOCABULARY:,}")
    print(f"logprobs, entropies, backward, in chunks  {ours / GIB:6.3f} GiB")
    print(f"one float32 log_softmax with autograd     {theirs / GIB:6.3f} GiB   ours is {ours / theirs:.3f} of it")
    print(f"largest relative difference of gradients  {gap:.1e}")


if __name__ == "__main__":
    print(measure(sys.argv[1], Path(sys.argv[2])))
