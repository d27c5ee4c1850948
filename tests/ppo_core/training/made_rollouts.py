"""Rollouts of given lengths, made without an engine."""

from __future__ import annotations

import torch

from ppo_core.data.prompts import PromptBatch
from ppo_core.rollout.batch import Rollout, assemble
from ppo_core.rollout.engine import Response
from tests.ppo_core.tiny_models import VOCABULARY


def made_rollout(prompt_lengths: list[int], response_lengths: list[int], seed: int = 0) -> Rollout:
    """Random ids; a response of full length ends by itself, an empty one was cut off."""
    generator = torch.Generator().manual_seed(seed)

    def ids(length: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()

    prompts = [ids(length) for length in prompt_lengths]
    responses = [Response(ids(length), "stop" if length else "length", [-1.0] * length) for length in response_lengths]
    batch = PromptBatch(prompts, ["prompt"] * len(prompts), list(range(len(prompts))))
    return assemble(batch, responses, 0, lambda tokens: " ".join(map(str, tokens)), 0)
