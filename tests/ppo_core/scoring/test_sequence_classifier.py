"""Reward models: their own tokenizer, and a score that no padding can move."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from ppo_core.errors import DataError
from ppo_core.scoring import sequence_classifier
from ppo_core.scoring.sequence_classifier import SequenceClassifier
from ppo_core.scoring.source import Unusable
from tests.ppo_core.tiny_models import tiny_model, tiny_tokenizer

PROMPTS = ["the", "the film is", "a bad film and a"]
RESPONSES = [" film", " good", " good film</s>, and 🎬"]

CONFIGS = {
    "llama": (LlamaConfig, {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}),
    "gemma2": (
        Gemma2Config,
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8},
    ),
    "gpt2": (GPT2Config, {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "bert": (BertConfig, {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}),
}


def saved(
    folder: Path, family: str = "llama", tokenizer: PreTrainedTokenizerFast | None = None, **changes: object
) -> Path:
    """A random reward model with its tokenizer; pad and end-of-text are one id."""
    tokenizer = tokenizer or tiny_tokenizer()
    kind, sizes = CONFIGS[family]
    heads = {} if family == "gpt2" else {"num_attention_heads": 4}
    settings = {"vocab_size": 300, "num_labels": 1, "pad_token_id": 2, "eos_token_id": 2, "initializer_range": 0.2}
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_config(kind(**{**settings, **sizes, **heads, **changes}))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_neither_padding_nor_its_side_moves_a_score(
    tmp_path: Path, family: str, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T05: huggingface/trl#2778."""
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = side
    made = SequenceClassifier(saved(tmp_path, family, tokenizer))
    together = made.score(PROMPTS, RESPONSES)
    alone = [made.score([prompt], [response])[0] for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    assert together == pytest.approx(alone, abs=1e-5)
    assert len({round(float(score), 4) for score in together}) == 3  # type: ignore[arg-type]
    monkeypatch.setattr(sequence_classifier, "BATCH_TOKENS", 20)
    assert made.score(PROMPTS[::-1], RESPONSES[::-1])[::-1] == pytest.approx(together, abs=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_score_is_the_models_own(tmp_path: Path, family: str) -> None:
    made = SequenceClassifier(saved(tmp_path, family))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    ids = tiny_tokenizer()("the film is good", return_tensors="pt")["input_ids"]
    assert made.score(["the film"], [" is good"]) == pytest.approx([model(input_ids=ids).logits.item()], abs=1e-5)


def test_a_reward_models_vocabulary_is_its_own(tmp_path: Path) -> None:
    """T16: huggingface/trl#1674. Policy {a: 3, b: 4}, reward model {b: 3, a: 4}, "a" is good."""
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "b": 3, "a": 4}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    saved(tmp_path, tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>"), vocab_size=5)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[4] = 1.0
        for layer in model.model.layers:
            for parameter in layer.parameters():
                parameter.zero_()
        model.score.weight.fill_(1 / 32)
    model.save_pretrained(tmp_path)
    assert SequenceClassifier(tmp_path).score(["", ""], ["a", "b"]) == pytest.approx([1.0, 0.0], abs=1e-4)


def test_control_tokens_in_a_text_are_text(tmp_path: Path) -> None:
    made = SequenceClassifier(saved(tmp_path))
    ids = tiny_tokenizer()("good</s>", split_special_tokens=True)["input_ids"]
    assert 2 not in ids
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert made.score(["good"], ["</s>"]) == pytest.approx([model(torch.tensor([ids])).logits.item()], abs=1e-5)


def test_what_cannot_be_read_whole_has_no_score(tmp_path: Path) -> None:
    made = SequenceClassifier(saved(tmp_path, max_position_embeddings=16))
    results = made.score(["the film", "", "the"], [" is good" * 9, "", " film"])
    assert [type(result) for result in results] == [Unusable, Unusable, float]
    assert [result.reason for result in results if isinstance(result, Unusable)] == ["too_long", "empty_text"]


def test_a_score_that_is_nan_is_passed_on_as_such(tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(saved(tmp_path))
    model.score.weight.data.fill_(math.nan)
    model.save_pretrained(tmp_path)
    assert math.isnan(SequenceClassifier(tmp_path).score(["the"], [" film"])[0])  # type: ignore[arg-type]


def test_what_is_no_reward_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has 2 outputs"):
        SequenceClassifier(saved(tmp_path / "two", num_labels=2))
    tiny_model().save_pretrained(tmp_path / "policy")
    tiny_tokenizer().save_pretrained(tmp_path / "policy")
    with pytest.raises(DataError, match="has no trained score"):
        SequenceClassifier(tmp_path / "policy")
    with pytest.raises(DataError, match="can be loaded"):
        SequenceClassifier(tmp_path / "nothing")


@torch.no_grad()
def test_a_soft_cap_on_attention_scores_is_kept(tmp_path: Path) -> None:
    """The fused kernel leaves it out."""
    folder = saved(tmp_path, "gemma2", attn_logit_softcapping=0.05)
    own = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    ids = tiny_tokenizer()(["the film is good"], return_tensors="pt", return_token_type_ids=False)
    (score,) = SequenceClassifier(folder).score(["the film is"], [" good"])
    assert score == pytest.approx(own(**ids).logits.item(), abs=1e-5)
