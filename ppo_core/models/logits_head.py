"""The language-model head, called on chosen hidden states only, so that logits of a whole batch are never held.

It knows the few ways in which model families change logits after the output embedding, and is checked against the
model's own logits when a policy is loaded. It does not know what the states are about.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ppo_core.alignment import gathered_logprobs
from ppo_core.errors import DataError, ShapeError
from ppo_core.losses import token_entropies
from ppo_core.model_shape import head_positions
from ppo_core.models.token_sets import TokenSets

# "measured": without gradient, so that a metric costs no memory in the update.
EntropyUse = Literal["none", "measured", "trained"]

# Two float32 routes to the same logit; families that change logits in a way unknown here are off by far more.
HEAD_TOLERANCE = 1e-3


@dataclass(frozen=True)
class LogitsHead:
    """From last hidden states [N, H] to logits [N, V]: output embedding, then the family's scale and soft cap.

    `model` is read at every call, so weights that are replaced or tied anew are the ones used.
    """

    model: Any
    scale: float = 1.0
    soft_cap: float | None = None

    @classmethod
    def of(cls, model: Any) -> LogitsHead:
        """The head of a Hugging Face causal language model.

        Raises:
            DataError: the model makes its logits in a way that this head does not reproduce.
        """
        config = model.config
        scale = 1.0
        if getattr(config, "logit_scale", None) is not None:  # Cohere multiplies
            scale = float(config.logit_scale)
        elif getattr(config, "logits_scaling", None) is not None:  # Granite divides
            scale = 1.0 / float(config.logits_scaling)
        cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2 and later
        head = cls(model, scale, None if cap is None else float(cap))
        head.check_against_model()
        return head

    def __call__(self, states: Tensor) -> Tensor:
        logits: Tensor = self.model.get_output_embeddings()(states)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits

    @torch.no_grad()
    def check_against_model(self) -> None:
        """Compare with the model's own logits of four tokens.

        Raises:
            DataError: they differ by more than rounding.
        """
        device = self.model.get_input_embeddings().weight.device
        ids = torch.arange(4, device=device).unsqueeze(0) % self.model.get_input_embeddings().num_embeddings
        whole = self.model(input_ids=ids, use_cache=False).logits.float()
        own = self(self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state).float()
        gap = float((whole - own).abs().max())
        if not gap <= HEAD_TOLERANCE * max(1.0, float(whole.abs().max())):
            raise DataError(
                f"{type(self.model).__name__} does not make its logits from its last hidden state as expected: "
                f"they differ by {gap:.3g}",
                hint="Use a model of a supported family: Llama, Qwen2/3, Mistral, Gemma, GPT-2, GPT-NeoX or Phi.",
            )

    def logprobs(
        self,
        states: Tensor,
        tokens: Tensor,
        temperature: float,
        entropy: EntropyUse,
        token_sets: TokenSets | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Logprobs of `tokens`, and the entropies of the distributions they were drawn from, chunk by chunk.

        With gradients on and more than one chunk, a chunk's logits are made again in the backward pass instead of
        being kept.

        Args:
            states: [N, H], each the state that predicts the token of the same index.
            tokens: [N] int64.
            temperature: the sampling temperature, > 0.
            entropy: whether to return entropies too, and whether they carry a gradient.
            token_sets: the ids that could be drawn for each of the N tokens; None: all of them.

        Returns:
            logprobs [N] and entropies [N] or None; float32, nats.

        Raises:
            ShapeError: there are not as many token sets as tokens.
        """
        if token_sets is not None and len(token_sets) != len(tokens):
            raise ShapeError(f"{len(token_sets)} token sets do not fit {len(tokens)} tokens")
        step = head_positions(self.model.get_output_embeddings().out_features)
        ends = [(at, at + step) for at in range(0, max(1, len(tokens)), step)]
        chunks = [
            (states[at:end], tokens[at:end], None if token_sets is None else token_sets.part(at, end))
            for at, end in ends
        ]
        remake = torch.is_grad_enabled() and len(chunks) > 1

        def one(some: Tensor, wanted: Tensor, sets: TokenSets | None) -> tuple[Tensor, Tensor | None]:
            logits = self(some) if sets is None else sets.limit(self(some))
            logprobs = gathered_logprobs(logits, wanted, temperature)
            if entropy == "none":
                return logprobs, None
            with torch.set_grad_enabled(torch.is_grad_enabled() and entropy == "trained"):
                return logprobs, token_entropies(logits, temperature)

        parts = [
            checkpoint(one, *chunk, use_reentrant=False, preserve_rng_state=False) if remake else one(*chunk)
            for chunk in chunks
        ]
        entropies = [part[1] for part in parts if part[1] is not None]
        return torch.cat([part[0] for part in parts]), torch.cat(entropies) if entropies else None
