"""The body's calls: packed rows stay apart, and remade layers cost memory, never a number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ppo_core.errors import DataError, ShapeError
from ppo_core.models.trunk import Trunk
from tests.ppo_core.tiny_models import FAMILIES, VOCABULARY, tiny_model

LENGTHS = [9, 1, 12, 5]
WIDTH = 14


def rows() -> tuple[Tensor, Tensor, Tensor]:
    """Right-padded rows whose every token but the first is asked for."""
    ids = torch.randint(3, VOCABULARY, (4, WIDTH), generator=torch.Generator().manual_seed(0))
    attention = (torch.arange(WIDTH) < torch.tensor(LENGTHS).unsqueeze(1)).long()
    return ids, attention, attention[:, 1:].bool()


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_have_the_states_of_padded_ones(family: str) -> None:
    model = tiny_model(family)
    padded = Trunk(model).predicting_states(*rows())
    packed = Trunk(model, "packed").predicting_states(*rows())
    assert padded.shape == (sum(LENGTHS) - len(LENGTHS), 32)
    assert torch.allclose(padded, packed, atol=1e-5)


def test_padding_on_the_left_packs_the_same() -> None:
    ids, attention, mask = rows()
    model = tiny_model()
    left = [
        torch.stack([row.roll(WIDTH - length) for row, length in zip(x, LENGTHS, strict=True)])
        for x in (ids, attention)
    ]
    left_mask = left[1][:, 1:].bool() & left[1][:, :-1].bool()
    packed = Trunk(model, "packed")
    assert torch.allclose(packed.predicting_states(*left, left_mask), packed.predicting_states(ids, attention, mask))


def test_a_kernel_that_mixes_packed_rows_is_refused() -> None:
    class Mixes(nn.Module):
        """Every state is the mean of all embeddings before it, whatever the positions say."""

        dtype = torch.float32

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(16, 4)

        def get_input_embeddings(self) -> nn.Embedding:
            return self.embedding

        def base_model(self, input_ids: Tensor, **ignored: Any) -> Any:
            class Output:
                last_hidden_state = self.embedding(input_ids).cumsum(1)

            return Output

    with pytest.raises(DataError, match="does not keep packed rows apart: states differ by") as caught:
        Trunk(Mixes(), "packed")
    assert caught.value.hint == "Set update.pack_rows to false."


def test_checkpointed_layers_give_the_same_gradients_and_keep_less() -> None:
    found = {}
    for checkpointing in (False, True):
        model = tiny_model(num_hidden_layers=6)
        trunk = Trunk(model, gradient_checkpointing=checkpointing)
        kept: dict[int, int] = {}

        def keep(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[tensor.data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            states = trunk.predicting_states(*rows())
        states.square().sum().backward()
        found[checkpointing] = model.get_input_embeddings().weight.grad, sum(kept.values())
        assert not any(module.training for module in model.modules())
    assert torch.equal(found[True][0], found[False][0])
    assert found[True][1] < found[False][1] / 3


def test_shapes_that_do_not_fit_are_refused() -> None:
    ids, attention, _ = rows()
    with pytest.raises(ShapeError, match=r"mask \[4, 14\]: expected \[B, L\], \[B, L\] and \[B, L - 1\]"):
        Trunk(tiny_model()).predicting_states(ids, attention, attention.bool())
