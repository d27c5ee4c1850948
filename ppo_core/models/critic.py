"""A separate critic: a model of its own that estimates values, beside a policy that has no value head.

It reads the same rows as the policy, so it has the policy's vocabulary, and it must not look ahead: the value of a
token may rest only on what stood before it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ppo_core.errors import DataError
from ppo_core.models.policy import new_value_head, scattered
from ppo_core.models.trunk import RowLayout, Trunk


class CriticModel(nn.Module):
    """`body` is a Hugging Face model without head, `value_head` a linear map from its last hidden state, first zero.

    Raises:
        DataError: the body looks ahead, or can do neither the layout nor the saving of memory that is asked for.
    """

    def __init__(self, body: Any, layout: RowLayout = "padded", gradient_checkpointing: bool = False) -> None:
        super().__init__()
        self.body = body
        self.trunk = Trunk(body, layout, gradient_checkpointing)
        self._check_causal()
        self.value_head = new_value_head(int(body.config.hidden_size), self.trunk.device)

    def values(self, input_ids: Tensor, attention_mask: Tensor, mask: Tensor) -> Tensor:
        """Values [B, T] of the tokens in the mask, each that of the state that predicts it; 0 elsewhere.

        Args:
            input_ids: [B, L] int64, padded anyhow; on any device, where the result will be, too.
            attention_mask: [B, L], 1 on prompt and response tokens.
            mask: [B, T] bool, True on the tokens that are asked for.
        """
        found: Tensor = self.value_head(self.trunk.predicting_states(input_ids, attention_mask, mask))
        return scattered(found.squeeze(-1), mask)

    @torch.no_grad()
    def _check_causal(self) -> None:
        num_ids = self.body.get_input_embeddings().num_embeddings
        ids = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5]], device=self.trunk.device) % num_ids
        states = self.body(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[:, :3].float()
        gap = float((states[0] - states[1]).abs().max())
        if not gap <= 1e-3 * max(1.0, float(states.abs().max())):
            raise DataError(
                f"{type(self.body).__name__} looks ahead: a later token changes earlier states by {gap:.3g}, so it "
                "cannot say what a response was worth before it was written",
                hint="Give policy.critic_model a causal language model, or a reward model that is built on one.",
            )
