"""What passes hold, against what torch keeps, for every family that is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ppo_core.model_shape import ModelShape, model_shape
from ppo_core.models.policy import PolicyModel
from ppo_core.models.trunk import Trunk
from ppo_core.pass_memory import Tokens, decoding_bytes, kept_bytes, passing_bytes
from ppo_core.rollout.transformers_engine import TransformersEngine
from ppo_core.spec.groups import RolloutConfig
from tests.ppo_core.tensor_memory import LiveTensors
from tests.ppo_core.tiny_models import FAMILIES, tiny_config, tiny_model, tiny_tokenizer


def sizes_of(family: str) -> dict[str, Any]:
    """Wide enough that what is counted is nearly all there is."""
    if family == "gpt2":
        return {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 256}
    return {
        "hidden_size": 128,
        "intermediate_size": 320,
        "max_position_embeddings": 256,
        **({"head_dim": 32} if "head_dim" in tiny_config(family).to_dict() else {}),
    }


def shape_of(model: Any) -> ModelShape:
    shape = model_shape(model.config.to_dict())
    assert shape is not None
    return shape


def model_of(family: str, dtype: torch.dtype = torch.float32) -> Any:
    # The soft cap on attention scores is the model's own attention's alone.
    attention = "eager" if family == "gemma2" else "sdpa"
    return tiny_model(family, attention=attention, **sizes_of(family)).to(dtype)


def padded(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and a mask with a padded row, so that no kernel may leave the mask out."""
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, :3] = 0
    return torch.ones_like(mask), mask


def kept_by_torch(model: Any, rows: int, length: int) -> int:
    """Bytes that autograd saves in one forward pass of the body, weights aside."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            held.append(storage)  # so that no other storage gets its place
        return tensor

    held: list[torch.UntypedStorage] = []
    ids, mask = padded(rows, length)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        Trunk(model).predicting_states(ids, mask, mask[:, 1:].bool())
    return sum(kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_activations_are_what_torch_keeps(family: str, dtype: torch.dtype) -> None:
    """In short rows, and in long ones, where masks and squares of attention count."""
    model = model_of(family, dtype)
    for rows, length in ((8, 16), (2, 128)):
        estimated = kept_bytes(shape_of(model), Tokens(rows * length, length, dtype.itemsize), False)
        assert estimated == pytest.approx(kept_by_torch(model, rows, length), rel=0.15)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_that_keeps_nothing_holds_the_inside_of_one_layer(family: str) -> None:
    model, (rows, length) = model_of(family), (4, 64)
    ids, mask = padded(rows, length)
    live = LiveTensors(model)
    with torch.no_grad(), live:
        Trunk(model).predicting_states(ids, mask, mask[:, 1:].bool())
    estimated = passing_bytes(shape_of(model), Tokens(rows * length, length, 4))
    assert estimated == pytest.approx(live.peaks["before"], rel=0.3)


@pytest.mark.parametrize(("rows", "prompt", "response"), [(16, 4, 40), (8, 96, 4)])
def test_decoding_holds_a_cache_of_whole_rows_or_the_pass_over_its_prompts(
    rows: int, prompt: int, response: int
) -> None:
    # Of so many ids hardly one answer draws the one that ends it.
    model = tiny_model("llama", vocab_size=2000, **sizes_of("llama"))
    policy = PolicyModel(model, "separate")
    config = RolloutConfig(max_new_tokens=response, temperature=1.0)
    engine = TransformersEngine(policy, tiny_tokenizer(), config)
    live = LiveTensors(model)
    with live:
        answers = engine.generate([[1] * prompt] * rows, seeds=list(range(rows)))
    longest = prompt + max(len(answer.ids) for answer in answers)
    estimated = decoding_bytes(shape_of(model), rows, prompt, longest, 4)
    assert estimated == pytest.approx(live.peaks["before"], rel=0.25)


def test_gradient_checkpointing_keeps_the_inputs_of_layers_and_the_inside_of_one() -> None:
    """Most is held when the last layer is made again: all inputs are there, and no gradient is yet."""
    model = tiny_model("llama", **{**sizes_of("llama"), "num_hidden_layers": 6}).requires_grad_(False)
    model.get_input_embeddings().requires_grad_()  # so that the way back goes through all layers
    ids, mask = padded(4, 64)
    trunk, live = Trunk(model, gradient_checkpointing=True), LiveTensors(model)
    with live:
        trunk.predicting_states(ids, mask, mask[:, 1:].bool()).sum().backward()  # type: ignore[no-untyped-call]
    whole, saving = (kept_bytes(shape_of(model), Tokens(256, 64, 4), on) for on in (False, True))
    assert saving < whole / 3
    assert live.peaks["before"] == pytest.approx(saving, rel=0.25)
