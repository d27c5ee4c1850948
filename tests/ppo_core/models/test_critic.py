"""A separate critic reads rows as the policy does, starts at zero, and never looks ahead."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, LlamaForSequenceClassification

from ppo_core.errors import DataError
from ppo_core.models.critic import CriticModel
from ppo_core.models.loading import load_critic
from ppo_core.spec.groups import PolicyConfig
from tests.ppo_core.models.test_trunk import rows
from tests.ppo_core.tiny_models import tiny_config, tiny_model, tiny_tokenizer


def test_values_start_at_zero_and_move_with_the_head() -> None:
    critic = CriticModel(tiny_model().base_model)
    assert not critic.values(*rows()).any()
    nn.init.ones_(critic.value_head.weight)
    values = critic.values(*rows())
    mask = rows()[2]
    assert bool(values[mask].all())
    assert not values[~mask].any()


class StatesThatCount(nn.Module):
    """A body whose last hidden state at column t is the number t."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=1)
        self.embedding = nn.Embedding(8, 1)

    @property
    def base_model(self) -> nn.Module:
        return self

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, input_ids: Tensor, **ignored: Any) -> Any:
        columns = torch.arange(input_ids.shape[1]).float()
        return SimpleNamespace(last_hidden_state=columns.expand(*input_ids.shape)[..., None])


def test_a_value_is_that_of_the_state_that_predicts_its_token() -> None:
    """T36: verl#1758, in a separate critic. Response at columns 2, 3, 4: values 1, 2, 3."""
    critic = CriticModel(StatesThatCount())
    nn.init.ones_(critic.value_head.weight)
    mask = torch.tensor([[False, True, True, True, False, False]])
    values = critic.values(torch.zeros(1, 7, dtype=torch.long), torch.ones(1, 7), mask)
    assert values.tolist() == [[0, 1, 2, 3, 0, 0]]


def test_a_body_that_looks_ahead_is_refused() -> None:
    torch.manual_seed(0)
    body = BertModel(
        BertConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            initializer_range=0.2,
        )
    ).eval()
    with pytest.raises(DataError, match="BertModel looks ahead: a later token changes earlier states"):
        CriticModel(body)


def test_it_starts_from_a_reward_model_or_from_the_policy(tmp_path: Path) -> None:
    tiny_model(vocab_size=300, seed=3).save_pretrained(tmp_path / "policy")
    torch.manual_seed(1)
    reward = LlamaForSequenceClassification(tiny_config(vocab_size=300, num_labels=1))
    reward.save_pretrained(tmp_path / "reward")
    for name in ("policy", "reward"):
        tiny_tokenizer().save_pretrained(tmp_path / name)
    policy = str(tmp_path / "policy")
    from_policy = load_critic(PolicyConfig(model=policy, value_head="separate"))
    from_reward = load_critic(PolicyConfig(model=policy, value_head="separate", critic_model=str(tmp_path / "reward")))
    assert from_policy is not None
    assert from_reward is not None
    assert torch.equal(
        from_policy.body.embed_tokens.weight, tiny_model(vocab_size=300, seed=3).model.embed_tokens.weight
    )
    assert torch.equal(from_reward.body.embed_tokens.weight, reward.model.embed_tokens.weight)
    assert load_critic(PolicyConfig(model=policy)) is None


def test_a_critic_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """T16's kind: an id that means another text to each of two models."""
    for name, special in (("policy", ("<pad>", "<s>", "</s>")), ("critic", ("<s>", "<pad>", "</s>"))):
        tiny_model(vocab_size=300).save_pretrained(tmp_path / name)
        tiny_tokenizer(special).save_pretrained(tmp_path / name)
    config = PolicyConfig(model=str(tmp_path / "policy"), value_head="separate", critic_model=str(tmp_path / "critic"))
    with pytest.raises(DataError, match="an id means another text to each"):
        load_critic(config)
