"""A model's body, called on whole rows: from token ids to the hidden states that predict the tokens asked for.

Rows are either padded to the longest one, or packed: laid end to end without padding, each with positions of its own,
where the attention kernel keeps them apart. It knows neither heads nor what the states are for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from ppo_core.alignment import on_grid
from ppo_core.errors import DataError, ShapeError

RowLayout = Literal["padded", "packed"]
# Float32 rounding of attention over other shapes is near 1e-6; bfloat16 keeps 8 bits. Rows that see each other differ
# by about the states themselves.
LAYOUT_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}


@dataclass(frozen=True)
class Trunk:
    """`model` is a Hugging Face model, with its head or without; its body is read at every call.

    With `gradient_checkpointing` a layer's inner activations are not kept for the backward pass but made again in it.

    Raises:
        DataError: the model can do neither the layout nor the saving of memory that is asked for.
    """

    model: Any
    layout: RowLayout = "padded"
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.layout == "packed":
            self._check_packing()
        if self.gradient_checkpointing:
            if not self.model.supports_gradient_checkpointing:
                raise DataError(
                    f"{type(self.model).__name__} cannot make its layers again in the backward pass",
                    hint="Set policy.gradient_checkpointing to false.",
                )
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    @property
    def device(self) -> torch.device:
        """Where the weights are, and the states will be."""
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    def predicting_states(self, input_ids: Tensor, attention_mask: Tensor, mask: Tensor) -> Tensor:
        """The last hidden states [N, H] that predict the N tokens in the mask, row by row.

        Args:
            input_ids: [B, L] int64, padded anyhow, on any device.
            attention_mask: [B, L], 1 on real tokens.
            mask: [B, L - 1] bool, on the shifted grid.

        Raises:
            ShapeError: the tensors do not fit.
        """
        rows, columns = input_ids.shape
        if attention_mask.shape != (rows, columns) or mask.shape != (rows, columns - 1):
            raise ShapeError(
                f"input_ids have shape {list(input_ids.shape)}, attention_mask {list(attention_mask.shape)}, mask "
                f"{list(mask.shape)}: expected [B, L], [B, L] and [B, L - 1]"
            )
        run = self._packed if self.layout == "packed" else self._padded
        checkpointing = self.gradient_checkpointing and torch.is_grad_enabled()
        with _checkpointed_layers(self.model) if checkpointing else nullcontext():
            return run(input_ids.to(self.device), attention_mask.to(self.device), mask.bool().to(self.device))

    def _padded(self, input_ids: Tensor, attention_mask: Tensor, mask: Tensor) -> Tensor:
        hidden: Tensor = self.model.base_model(
            input_ids=input_ids,
            attention_mask=attention_mask.long(),
            position_ids=position_ids(attention_mask),
            use_cache=False,
        ).last_hidden_state
        return on_grid(hidden)[mask]

    def _packed(self, input_ids: Tensor, attention_mask: Tensor, mask: Tensor) -> Tensor:
        real = attention_mask.bool()
        # Without a mask, positions that start anew tell the model where one row ends and the next begins.
        hidden: Tensor = self.model.base_model(
            input_ids=input_ids[real].unsqueeze(0),
            position_ids=position_ids(attention_mask)[real].unsqueeze(0),
            use_cache=False,
        ).last_hidden_state
        place = (real.flatten().long().cumsum(0) - 1).view(real.shape)  # of each real token in the packed row
        return hidden[0, on_grid(place)[mask]]

    @torch.no_grad()
    def _check_packing(self) -> None:
        """Compare the states of two rows end to end with those of the two side by side."""
        ids = torch.arange(1, 11, device=self.device).view(2, 5) % self.model.get_input_embeddings().num_embeddings
        every = torch.ones_like(ids)
        mask = every[:, 1:].bool()
        apart, together = self._padded(ids, every, mask).float(), self._packed(ids, every, mask).float()
        gap = float((apart - together).abs().max())
        tolerance = LAYOUT_TOLERANCE.get(self.model.dtype, 1e-3)
        if not gap <= tolerance * max(1.0, float(apart.abs().max())):
            raise DataError(
                f"the attention of {type(self.model).__name__} does not keep packed rows apart: states differ by "
                f"{gap:.3g}",
                hint="Set update.pack_rows to false.",
            )


def position_ids(attention_mask: Tensor) -> Tensor:
    """[B, L] to [B, L]: each token's place among its row's real tokens, from 0; so left padding shifts nothing."""
    return (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)


@contextmanager
def _checkpointed_layers(model: Any) -> Iterator[None]:
    """Layers look at their own `training` flag before they save memory; what is inside them stays in evaluation mode.

    Only for the call: a layer so flagged refuses the key-value cache, which generation on the same modules needs.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
