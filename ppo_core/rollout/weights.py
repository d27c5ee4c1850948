"""What travels to a rollout engine in a sync: the policy's weights, and a probe that shows whether it uses them.

It knows neither engines nor how ranks share a model out; whoever does passes in how to make weights whole.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ppo_core.models.adapters import is_adapter, merged_weight, plain_name
from ppo_core.models.policy import PolicyModel

# For the time it is entered, the given parameters are whole on this rank.
Gather = Callable[[list[nn.Parameter]], AbstractContextManager[None]]

# Runs a part that needs no other rank; fails on all ranks where it fails on one, before any of them waits for another.
Agree = Callable[[Callable[[], None]], object]

PROBE_LENGTHS = (3, 8)
_LAYER = re.compile(r"^.*?\.\d+(?=\.)")


class PolicyWeights:
    """The policy's weights as pairs of name and tensor, named and merged as a Hugging Face checkpoint of it holds them.

    Adapters are merged in; tied weights come once, under their first name; the value head is not among them. Layer
    by layer, and a tensor is good until the next pair is asked for. Every rank must iterate to the end, since making
    weights whole may take all of them.

    Source: the traps of gathering a whole partitioned model at once, huggingface/trl#2557, modelscope/ms-swift#7986.
    """

    def __init__(
        self,
        policy: PolicyModel,
        gather: Gather = lambda parameters: nullcontext(),
        agree: Agree = lambda local: local(),
    ) -> None:
        self.policy = policy
        self._gather = gather
        self._agree = agree

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        named = self.policy.model.named_parameters()  # tied ones once
        for _, layer in groupby(named, key=lambda pair: _layer_of(pair[0])):
            pairs = list(layer)
            with self._gather([parameter for _, parameter in pairs]):
                yield from self._merged(pairs)

    def _merged(self, layer: list[tuple[str, nn.Parameter]]) -> list[tuple[str, Tensor]]:
        made: list[tuple[str, Tensor]] = []

        def merge() -> None:
            for name, parameter in layer:
                if not is_adapter(name):
                    made.append((plain_name(name), merged_weight(self.policy.model, name, parameter.detach())))

        self._agree(merge)
        return made

    def held(self, keep: bool = True) -> dict[str, Tensor]:
        """All of them at once, copied to the host; iterated but not kept, and so empty, where `keep` is False."""
        return {name: tensor.cpu().clone() for name, tensor in self if keep}


def _layer_of(name: str) -> str:
    match = _LAYER.match(name)
    return match[0] if match else name


def save_policy(policy: PolicyModel, weights: dict[str, Tensor], folder: Path, tokenizer: Any | None = None) -> None:
    """Write a policy with these weights as a Hugging Face folder, without the value head; with its tokenizer if given.

    Tied embeddings are one tensor in the file, too.
    """
    policy.model.save_pretrained(folder, state_dict=weights)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def weights_digest(pairs: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over name, type, shape and bytes of every tensor, whatever order they come in.

    Any change of any bit, key or shape changes it.
    """
    return digest_of(line_of(name, tensor) for name, tensor in pairs)


def line_of(name: str, tensor: Tensor) -> str:
    """What one tensor adds to a digest: for weights that come a few at a time."""
    held = tensor.detach().cpu().contiguous()
    own = hashlib.sha256(held.reshape(-1).view(torch.uint8).numpy().data).hexdigest()
    return f"{name} {held.dtype} {list(held.shape)} {own}\n"


def digest_of(lines: Iterable[str]) -> str:
    """The digest of the tensors that these lines are of."""
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


@dataclass(frozen=True)
class Probe:
    """Fixed rows of token ids, and what the trainer says of the last `num_forced` tokens of each, at temperature 1.

    Not at the sampling temperature: dividing by 1e-4 would blow rounding up to what a stale weight does.
    """

    rows: tuple[tuple[int, ...], ...]
    num_forced: int
    logprobs: Tensor  #: [rows, num_forced] float32, nats

    def gap(self, logprobs: Tensor) -> float:
        """Largest difference in nats between the trainer's logprobs and these, of the same tokens; inf for NaN."""
        return float((logprobs.cpu() - self.logprobs).abs().nan_to_num(nan=torch.inf).max())


@torch.no_grad()
def probe_of(policy: PolicyModel, logprobs: Callable[..., Tensor] | None = None) -> Probe:
    """The probe with this policy's own logprobs.

    Args:
        policy: the trained one.
        logprobs: its method of that name, where it has to be called by another way; all ranks then call this together.
    """
    ask = logprobs or policy.logprobs
    num_tokens = policy.model.get_input_embeddings().num_embeddings
    steps = max(PROBE_LENGTHS)
    spread = torch.arange(len(PROBE_LENGTHS) * 2 * steps).reshape(len(PROBE_LENGTHS), 2 * steps) * 7919 + 11
    rows, found = [], []
    for numbers, length in zip(spread % num_tokens, PROBE_LENGTHS, strict=True):
        ids = torch.cat((numbers[:length], numbers[steps:])).to(policy.device).unsqueeze(0)
        mask = torch.arange(1, ids.shape[1], device=policy.device).unsqueeze(0) >= length
        found.append(ask(ids, torch.ones_like(ids), mask, temperature=1.0)[mask])
        rows.append(tuple(ids[0].tolist()))
    return Probe(tuple(rows), steps, torch.stack(found).float().cpu())
