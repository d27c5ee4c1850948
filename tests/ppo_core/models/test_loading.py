"""Loading and saving networks: no dropout, no missing weight, tied embeddings stay tied."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from ppo_core.errors import DataError
from ppo_core.models.loading import load_policy, load_reference, load_tokenizer
from ppo_core.spec.groups import PolicyConfig
from tests.ppo_core.tiny_models import saved, tiny_model, tiny_tokenizer

IDS = torch.tensor([[1, 5, 9, 13]])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("gpt2", resid_pdrop=0.1, attn_pdrop=0.1, embd_pdrop=0.1).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_dropout_is_off_in_training_mode(folder: Path) -> None:
    policy = load_policy(PolicyConfig(model=str(folder))).train()
    assert policy.model.config.attn_pdrop == 0
    first, second = (policy.model(input_ids=IDS).logits for _ in range(2))
    assert torch.equal(first, second)


def test_attention_dropout_held_by_modules_is_off(tmp_path: Path) -> None:
    tiny_model("llama", attention_dropout=0.5).save_pretrained(tmp_path)
    policy = load_policy(PolicyConfig(model=str(tmp_path))).train()
    assert torch.equal(policy.model(input_ids=IDS).logits, policy.model(input_ids=IDS).logits)


def test_weights_are_float32_and_have_gradients(tmp_path: Path) -> None:
    tiny_model().bfloat16().save_pretrained(tmp_path)
    policy = load_policy(PolicyConfig(model=str(tmp_path), value_head="shared_detached"))
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    assert all(parameter.requires_grad for parameter in policy.parameters())
    assert policy.value_head_kind == "shared_detached"


@pytest.mark.parametrize("family", ["llama", "gemma", "gpt2", "phi"])
def test_a_pad_id_that_is_read_as_a_token_learns_like_any_other(tmp_path: Path, family: str) -> None:
    """T01's kind: torch gives the embedding of a config's pad id no gradient, here that of begin-of-text, too."""
    tiny_model(family, pad_token_id=1, tie_word_embeddings=False).save_pretrained(tmp_path)
    policy = load_policy(PolicyConfig(model=str(tmp_path)))
    mask = torch.tensor([[False, True, True]])
    policy.logprobs(IDS, torch.ones_like(IDS), mask, temperature=1.0).sum().backward()
    gradient = policy.model.get_input_embeddings().weight.grad
    assert [bool(gradient[token].any()) for token in (1, 5, 9, 13)] == [True, True, True, False]


def test_the_reference_is_frozen(folder: Path) -> None:
    reference = load_reference(PolicyConfig(model=str(folder)))
    assert not reference.training
    assert not any(parameter.requires_grad for parameter in reference.parameters())


def test_tied_embeddings_stay_one_tensor_through_save_load_update_save_load(tmp_path: Path) -> None:
    """T26: NVIDIA-NeMo/Megatron-Bridge#919."""
    tiny_model("llama").save_pretrained(tmp_path / "0")
    for step in range(2):
        policy = load_policy(PolicyConfig(model=str(tmp_path / str(step))))
        inputs, outputs = policy.model.get_input_embeddings(), policy.model.get_output_embeddings()
        assert inputs.weight is outputs.weight
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
        policy.model(input_ids=IDS).logits.square().sum().backward()
        optimizer.step()
        saved(policy, tmp_path / str(step + 1))
        again = load_policy(PolicyConfig(model=str(tmp_path / str(step + 1))))
        assert again.model.get_input_embeddings().weight is again.model.get_output_embeddings().weight
        assert torch.equal(again.model(input_ids=IDS).logits, policy.model(input_ids=IDS).logits)
    names = load_file(tmp_path / "2" / "model.safetensors").keys()
    assert "lm_head.weight" not in names
    assert (tmp_path / "2" / "model.safetensors").stat().st_size == (
        tmp_path / "0" / "model.safetensors"
    ).stat().st_size


def test_a_saved_policy_is_a_plain_folder_without_the_value_head(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "start")
    policy = load_policy(PolicyConfig(model=str(tmp_path / "start")))
    nn.init.ones_(policy.value_head.weight)
    saved(policy, tmp_path / "saved", tiny_tokenizer())
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert torch.equal(model.eval()(input_ids=IDS).logits, policy.model(input_ids=IDS).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").decode([2]) == "</s>"


def test_a_folder_with_a_missing_weight_is_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["transformer.h.1.ln_1.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"1 weights are not in its files, transformer\.h\.1\.ln_1\.weight first"):
        load_policy(PolicyConfig(model=str(folder)))


def test_no_model_and_no_tokenizer_are_data_errors(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    for load in (load_policy, load_reference):
        with pytest.raises(DataError, match="can be loaded from"):
            load(PolicyConfig(model=str(nothing)))
    with pytest.raises(DataError, match="can be loaded from"):
        load_tokenizer(nothing)
