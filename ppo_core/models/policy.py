"""The policy: a causal language model, with a value head on its trunk unless a separate critic estimates values.

The trunk runs once over the rows; the language-model head then sees only the states that predict response tokens. It
does not know where rows come from, nor how logprobs become a loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ppo_core.alignment import next_tokens
from ppo_core.models.logits_head import EntropyUse, LogitsHead
from ppo_core.models.token_sets import TokenSets
from ppo_core.models.trunk import RowLayout, Trunk

ValueHeadKind = Literal["shared", "shared_detached", "separate"]


@dataclass(frozen=True)
class PolicyOutput:
    """What is said of one batch of responses, on the shifted grid [B, T]; 0 where masked. float32, nats."""

    logprobs: Tensor
    values: Tensor
    entropy: Tensor | None


class PolicyModel(nn.Module):
    """`model` is the Hugging Face causal language model, `value_head` a linear map from its last hidden state.

    The value head starts at zero: every value is 0 until it has learned, whatever the trunk. It and its input are
    float32. With `shared_detached` the value loss does not reach the trunk; with `separate` there is no value head
    here, and the values are 0.
    """

    def __init__(
        self,
        model: Any,
        value_head: ValueHeadKind = "shared",
        layout: RowLayout = "padded",
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.value_head_kind: ValueHeadKind = value_head
        self.trunk = Trunk(model, layout, gradient_checkpointing)
        self.logits_head = LogitsHead.of(model)
        hidden_size = model.get_output_embeddings().weight.shape[1]
        self.value_head = None if value_head == "separate" else new_value_head(hidden_size, self.trunk.device)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.trunk.device

    def predict(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        mask: Tensor,
        *,
        temperature: float,
        entropy: EntropyUse,
        freeze_policy: bool = False,
        token_sets: TokenSets | None = None,
    ) -> PolicyOutput:
        """Logprobs, values and, if wanted, entropies of the tokens in the mask.

        The value of a token is that of the state that predicts it. Padding on either side changes nothing.

        Args:
            input_ids: [B, L] int64, padded anyhow; on any device, where the results will be, too.
            attention_mask: [B, L], 1 on prompt and response tokens.
            mask: [B, T] bool, True on the tokens that are asked for.
            temperature: the sampling temperature, > 0.
            entropy: whether to return each token's entropy too, and whether it carries a gradient.
            freeze_policy: only the value head gets a gradient; the logprobs have none.
            token_sets: the ids that could be drawn for each token in the mask, row by row; None: all of them.

        Raises:
            ShapeError: the three tensors do not fit.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and not freeze_policy):
            states = self.trunk.predicting_states(input_ids, attention_mask, mask)
            tokens = next_tokens(input_ids)[mask.bool()].to(states.device)
            logprobs, entropies = self.logits_head.logprobs(states, tokens, temperature, entropy, token_sets)
        return PolicyOutput(
            logprobs=scattered(logprobs, mask),
            values=self._values(states, mask),
            entropy=None if entropies is None else scattered(entropies, mask),
        )

    def logprobs(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        mask: Tensor,
        *,
        temperature: float,
        token_sets: TokenSets | None = None,
    ) -> Tensor:
        """`predict`'s logprobs alone: [B, T], 0 where masked."""
        states = self.trunk.predicting_states(input_ids, attention_mask, mask)
        tokens = next_tokens(input_ids)[mask.bool()].to(states.device)
        found, _ = self.logits_head.logprobs(states, tokens, temperature, "none", token_sets)
        return scattered(found, mask)

    def _values(self, states: Tensor, mask: Tensor) -> Tensor:
        if self.value_head is None:
            return torch.zeros(mask.shape, device=mask.device)
        read = states.detach() if self.value_head_kind == "shared_detached" else states
        values: Tensor = self.value_head(read)
        return scattered(values.squeeze(-1), mask)


class ValueHead(nn.Linear):
    """A linear map to one value, computed in float32, whatever its weights were rounded to."""

    def forward(self, states: Tensor) -> Tensor:
        return nn.functional.linear(states.float(), self.weight.float(), self.bias.float())


def new_value_head(hidden_size: int, device: torch.device) -> ValueHead:
    """All zero, so that no first value is noise."""
    head = ValueHead(hidden_size, 1, dtype=torch.float32, device=device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def scattered(found: Tensor, mask: Tensor) -> Tensor:
    """[N] back to [B, T] on the mask's device, 0 elsewhere; keeps the gradient."""
    found = found.to(mask.device)
    return torch.zeros(mask.shape, dtype=found.dtype, device=found.device).masked_scatter(mask.bool(), found)
