"""The policy: a causal language model with a value head on its trunk, called once a pass for everything.

The trunk runs once over the padded rows; the language-model head then sees only the states that predict response
tokens. It does not know where rows come from, nor how logprobs become a loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ppo_core.alignment import next_tokens, on_grid
from ppo_core.errors import ShapeError
from ppo_core.models.logits_head import EntropyUse, LogitsHead

ValueHeadKind = Literal["shared", "shared_detached"]


@dataclass(frozen=True)
class PolicyOutput:
    """What the policy says of one batch of responses, on the shifted grid [B, T]; 0 where masked. float32, nats."""

    logprobs: Tensor
    values: Tensor
    entropy: Tensor | None


class PolicyModel(nn.Module):
    """`model` is the Hugging Face causal language model, `value_head` a linear map from its last hidden state.

    The value head starts at zero: every value is 0 until it has learned, whatever the trunk. It and its input are
    float32. With `shared_detached` the value loss does not reach the trunk.
    """

    def __init__(self, model: Any, value_head: ValueHeadKind = "shared") -> None:
        super().__init__()
        self.model = model
        self.value_head_kind: ValueHeadKind = value_head
        hidden_size = model.get_output_embeddings().weight.shape[1]
        self.value_head = nn.Linear(
            hidden_size, 1, dtype=torch.float32, device=model.get_input_embeddings().weight.device
        )
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        self.logits_head = LogitsHead.of(model)

    @property
    def device(self) -> torch.device:
        """Where the weights, and so the inputs, must be."""
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    def predict(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        mask: Tensor,
        *,
        temperature: float,
        entropy: EntropyUse,
        detach_trunk: bool = False,
    ) -> PolicyOutput:
        """Logprobs, values and, if wanted, entropies of the tokens in the mask.

        The value of a token is that of the state that predicts it. Padding on either side changes nothing.

        Args:
            input_ids: [B, L] int64, padded anyhow; on any device, where the results will be, too.
            attention_mask: [B, L], 1 on prompt and response tokens.
            mask: [B, T] bool, True on the tokens that are asked for.
            temperature: the sampling temperature, > 0.
            entropy: whether to return each token's entropy too, and whether it carries a gradient.
            detach_trunk: only the value head gets a gradient; the logprobs have none.

        Raises:
            ShapeError: the three tensors do not fit.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and not detach_trunk):
            states = predicting_states(self.model, input_ids, attention_mask, mask)
            tokens = next_tokens(input_ids)[mask.bool()].to(states.device)
            logprobs, entropies = self.logits_head.logprobs(states, tokens, temperature, entropy)
        values = self.value_head((states.detach() if self.value_head_kind == "shared_detached" else states).float())
        return PolicyOutput(
            logprobs=_on_mask(logprobs, mask),
            values=_on_mask(values.squeeze(-1), mask),
            entropy=None if entropies is None else _on_mask(entropies, mask),
        )

    def logprobs(self, input_ids: Tensor, attention_mask: Tensor, mask: Tensor, *, temperature: float) -> Tensor:
        """`predict`'s logprobs alone: [B, T], 0 where masked."""
        states = predicting_states(self.model, input_ids, attention_mask, mask)
        tokens = next_tokens(input_ids)[mask.bool()].to(states.device)
        found, _ = self.logits_head.logprobs(states, tokens, temperature, "none")
        return _on_mask(found, mask)

    def save_pretrained(self, folder: Path, tokenizer: Any | None = None) -> None:
        """Write the language model as a Hugging Face folder, without the value head; with its tokenizer if given.

        Tied embeddings are one tensor in the file, too.
        """
        self.model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


def position_ids(attention_mask: Tensor) -> Tensor:
    """[B, L] to [B, L]: each token's place among its row's real tokens, from 0; so left padding shifts nothing."""
    return (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)


def predicting_states(model: Any, input_ids: Tensor, attention_mask: Tensor, mask: Tensor) -> Tensor:
    """The trunk's last hidden states [N, H] that predict the N tokens in the mask, row by row.

    Raises:
        ShapeError: the tensors are not [B, L], [B, L] and [B, L - 1].
    """
    rows, columns = input_ids.shape
    if attention_mask.shape != (rows, columns) or mask.shape != (rows, columns - 1):
        raise ShapeError(
            f"input_ids have shape {list(input_ids.shape)}, attention_mask {list(attention_mask.shape)}, mask "
            f"{list(mask.shape)}: expected [B, L], [B, L] and [B, L - 1]"
        )
    device = model.get_input_embeddings().weight.device
    hidden: Tensor = model.base_model(
        input_ids=input_ids.to(device),
        attention_mask=attention_mask.long().to(device),
        position_ids=position_ids(attention_mask).to(device),
        use_cache=False,
    ).last_hidden_state
    return on_grid(hidden)[mask.bool().to(device)]


def _on_mask(found: Tensor, mask: Tensor) -> Tensor:
    """[N] back to [B, T] on the mask's device, 0 elsewhere; keeps the gradient."""
    found = found.to(mask.device)
    return torch.zeros(mask.shape, dtype=found.dtype, device=found.device).masked_scatter(mask.bool(), found)
