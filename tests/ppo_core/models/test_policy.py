"""The policy's one pass: logprobs, values and entropies at the predicting positions, whatever the padding."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ppo_core.alignment import token_logprobs
from ppo_core.errors import DataError, ShapeError
from ppo_core.losses import token_entropies
from ppo_core.models import logits_head
from ppo_core.models.loading import load_policy
from ppo_core.models.logits_head import LogitsHead
from ppo_core.models.policy import PolicyModel, PolicyOutput
from ppo_core.models.trunk import Trunk, position_ids
from ppo_core.spec.groups import PolicyConfig
from tests.ppo_core.tiny_models import FAMILIES, VOCABULARY, tiny_model


def policy(family: str = "llama", kind: Any = "shared", **changes: Any) -> PolicyModel:
    """A tiny policy whose value head is not zero, so that values say something."""
    made = PolicyModel(tiny_model(family, **changes), kind)
    nn.init.normal_(made.value_head.weight, generator=torch.Generator().manual_seed(3))
    return made.eval()


def rows(lengths: list[int], width: int, left: bool, pad: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of fixed ids padded on one side; the mask asks for every token but a row's first two."""
    ids = torch.full((len(lengths), width), pad)
    attention = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        first = width - length if left else 0
        ids[row, first : first + length] = torch.arange(length) * 7 % (VOCABULARY - 3) + 3
        attention[row, first : first + length] = 1
    order = attention.cumsum(1) * attention
    return ids, attention, (order > 2)[:, 1:]


def score(made: PolicyModel, batch: tuple[Tensor, Tensor, Tensor], temperature: float = 1.0) -> PolicyOutput:
    return made.predict(*batch, temperature=temperature, entropy="trained")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_left_padding_changes_neither_logprobs_nor_values(family: str, attention: str) -> None:
    """T04: CarperAI/trlx#509, about 34 nats on one sequence without position ids."""
    made = policy(family, attention=attention)
    alone = score(made, rows([9], 9, left=False))
    wanted = rows([9], 9, left=False)[2]
    for padding in (1, 4, 9):
        batch = rows([9, 9 + padding], 9 + padding, left=True)
        padded = score(made, batch)
        mine = batch[2][0]
        for name in ("logprobs", "values", "entropy"):
            torch.testing.assert_close(
                getattr(padded, name)[0][mine], getattr(alone, name)[wanted], atol=1e-5, rtol=1e-5
            )


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_response_only_head_equals_all_logits(family: str) -> None:
    made = policy(family)
    ids, attention, mask = rows([12, 7, 3], 12, left=False)
    output = made.predict(ids, attention, mask, temperature=0.7, entropy="trained")
    logits = made.model(input_ids=ids, attention_mask=attention, position_ids=position_ids(attention)).logits
    zero = torch.zeros(())
    torch.testing.assert_close(output.logprobs, torch.where(mask, token_logprobs(logits, ids, 0.7), zero))
    assert output.entropy is not None
    torch.testing.assert_close(output.entropy, torch.where(mask, token_entropies(logits[:, :-1], 0.7), zero))


@torch.no_grad()
def test_temperature_divides_the_logits() -> None:
    """T07: OpenRLHF/OpenRLHF#853. Logits 2 1 0, token 1, temperature 0.5 give -2.1429, not -1.4076."""
    made = policy(tie_word_embeddings=False)
    batch = rows([8], 8, left=False)
    made.model.get_output_embeddings().weight.zero_()
    states = Trunk(made.model).predicting_states(*batch)
    # Weights that give logits 2 1 0 for the ids 5 6 7 and next to nothing for the others, at the first state.
    inverse = torch.linalg.pinv(states)[:, 0]
    wanted = torch.full((VOCABULARY,), -100.0)
    wanted[5:8] = torch.tensor([2.0, 1.0, 0.0])
    made.model.get_output_embeddings().weight.copy_(wanted.unsqueeze(1) * inverse)
    found, _ = made.logits_head.logprobs(states[:1], torch.tensor([6]), 0.5, False)
    assert found.item() == pytest.approx(-2.1429, abs=1e-3)


@torch.no_grad()
def test_logprobs_alone_are_the_scored_ones() -> None:
    made = policy()
    batch = rows([12, 7], 12, left=False)
    assert torch.equal(made.logprobs(*batch, temperature=0.7), score(made, batch, 0.7).logprobs)


def test_dropout_in_a_config_changes_no_ratio(tmp_path: Path) -> None:
    """T06: scored at batch 4 padded to 20, then one by one at their own length, in training mode."""
    tiny_model("gpt2", resid_pdrop=0.1, attn_pdrop=0.1, embd_pdrop=0.1).save_pretrained(tmp_path)
    made = load_policy(PolicyConfig(model=str(tmp_path)))
    lengths = [20, 11, 8, 5]
    with torch.no_grad():
        old = score(made, rows(lengths, 20, left=False))
    made.train()
    for row, length in enumerate(lengths):
        batch = rows([length], length, left=False)
        new = score(made, batch)
        ratio = (new.logprobs[0] - old.logprobs[row, : length - 1]).exp()[batch[2][0]]
        assert (ratio - 1).abs().max() < 1e-3


class StatesThatCount(nn.Module):
    """A language model whose last hidden state at column t is the number t."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace()
        self.embedding = nn.Embedding(8, 1)
        self.output = nn.Linear(1, 8, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.output

    def base_model(self, input_ids: Tensor, **ignored: Any) -> Any:
        return SimpleNamespace(
            last_hidden_state=torch.arange(input_ids.shape[1]).float().expand(*input_ids.shape)[..., None]
        )

    def forward(self, input_ids: Tensor, **ignored: Any) -> Any:
        return SimpleNamespace(logits=self.output(self.base_model(input_ids).last_hidden_state))


def test_a_value_is_that_of_the_state_that_predicts_its_token() -> None:
    """T36: hpcaitech/ColossalAI#3623. Response at columns 2, 3, 4: values 1, 2, 3."""
    made = PolicyModel(StatesThatCount())
    nn.init.ones_(made.value_head.weight)
    mask = torch.tensor([[False, True, True, True, False, False]])
    output = made.predict(torch.zeros(1, 7, dtype=torch.long), torch.ones(1, 7), mask, temperature=1.0, entropy="none")
    assert output.values.tolist() == [[0, 1, 2, 3, 0, 0]]
    assert output.entropy is None


def test_values_start_at_zero_and_the_head_has_a_gradient() -> None:
    made = PolicyModel(tiny_model())
    output = score(made, rows([8], 8, left=False))
    assert not output.values.any()
    (output.values - 1).square().sum().backward()
    assert made.value_head.weight.grad is not None
    assert made.value_head.weight.grad.abs().max() > 0


@pytest.mark.parametrize(("kind", "reaches"), [("shared", True), ("shared_detached", False)])
def test_the_value_loss_reaches_the_trunk_only_when_shared(kind: str, reaches: bool) -> None:
    made = policy(kind=kind)
    score(made, rows([8], 8, left=False)).values.sum().backward()
    gradients = [parameter.grad for parameter in made.model.parameters() if parameter.grad is not None]
    assert bool(gradients) == reaches


def test_with_the_trunk_detached_only_the_value_head_learns() -> None:
    made = policy()
    output = made.predict(*rows([8], 8, left=False), temperature=1.0, entropy="none", freeze_policy=True)
    assert not output.logprobs.requires_grad
    output.values.sum().backward()
    assert all(parameter.grad is None for parameter in made.model.parameters())
    assert made.value_head.weight.grad is not None


def test_chunks_give_the_same_numbers_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients(chunk: int) -> tuple[PolicyOutput, list[Tensor]]:
        monkeypatch.setattr(logits_head, "head_positions", lambda vocabulary: chunk)
        made = policy()
        output = score(made, rows([12, 9], 12, left=False))
        assert output.entropy is not None
        (output.logprobs.sum() + output.entropy.sum() + output.values.sum()).backward()
        return output, [parameter.grad for parameter in made.parameters() if parameter.grad is not None]

    whole, whole_gradients = gradients(4096)
    parts, part_gradients = gradients(5)
    torch.testing.assert_close(parts.logprobs, whole.logprobs)
    assert len(part_gradients) == len(whole_gradients)
    for part, one in zip(part_gradients, whole_gradients, strict=True):
        torch.testing.assert_close(part, one)


def test_left_padding_leaves_gradients_finite() -> None:
    made = policy()
    output = score(made, rows([12, 3], 12, left=True))
    (output.logprobs.sum() + output.values.sum()).backward()
    assert all(bool(p.grad.isfinite().all()) for p in made.parameters() if p.grad is not None)


def test_a_batch_without_a_response_token_has_a_zero_gradient() -> None:
    made = policy()
    ids, attention, mask = rows([4, 4], 4, left=False)
    output = score(made, (ids, attention, torch.zeros_like(mask)))
    (output.logprobs.sum() + output.values.sum()).backward()
    assert output.logprobs.shape == (2, 3)
    assert not made.value_head.weight.grad.any()  # type: ignore[union-attr]


def test_tensors_that_do_not_fit_are_refused() -> None:
    ids, attention, mask = rows([8], 8, left=False)
    with pytest.raises(ShapeError, match=r"\[1, 8\], attention_mask \[1, 8\], mask \[1, 6\]"):
        score(policy(), (ids, attention, mask[:, 1:]))


def test_a_model_with_logits_of_its_own_kind_is_refused() -> None:
    class Odd(StatesThatCount):
        def forward(self, input_ids: Tensor, **ignored: Any) -> Any:
            return SimpleNamespace(logits=super().forward(input_ids).logits + 1)

    with pytest.raises(DataError, match="does not make its logits"):
        LogitsHead.of(Odd())
