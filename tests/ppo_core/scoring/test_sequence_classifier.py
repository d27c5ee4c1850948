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
from ppo_core.scoring.sequence_classifier import ChatReading, SequenceClassifier, TextReading, reading_of, whole
from ppo_core.scoring.source import Unusable
from ppo_core.spec.scorers import Scorer
from ppo_core.spec.text_template import TextTemplate
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


def test_an_id_that_the_reward_model_does_not_know_costs_its_own_score(tmp_path: Path) -> None:
    """T16, the second half: a model of 4 ids with a tokenizer of 5. No index error, and row "b" has its score."""
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "b": 3, "a": 4}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")
    made = SequenceClassifier(saved(tmp_path, tokenizer=wrapped, vocab_size=4, pad_token_id=0))
    bad, good = made.score(["", ""], ["a", "b"])
    assert isinstance(bad, Unusable)
    assert bad.reason == "unknown_id"
    assert "gives id 4, the reward model knows 4" in bad.detail
    assert isinstance(good, float)


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


def test_a_reward_model_of_four_ids_scores_the_policys_texts(tmp_path: Path) -> None:
    """T16: the policy's ids, up to 299, never reach it."""
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<unk>": 1, "a": 2, "b": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    own = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")
    made = SequenceClassifier(saved(tmp_path, tokenizer=own, vocab_size=4))
    assert max(tiny_tokenizer()("a good film")["input_ids"]) > 3
    results = made.score(["a", "b", "the film"], [" a", " b", " is good"])
    assert all(isinstance(result, float) and math.isfinite(result) for result in results)


# How the text is made

CHAT = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if messages[0]['content'] == 'forbidden' %}{{ raise_exception('not that one') }}{% endif %}"
)


def own_score(folder: Path, ids: list[int]) -> float:
    with torch.no_grad():
        logits = AutoModelForSequenceClassification.from_pretrained(folder).eval()(torch.tensor([ids])).logits
    return float(logits.item())


def test_a_template_makes_the_text(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    made = SequenceClassifier(folder, reading=TextReading(TextTemplate.parse("Q: {prompt}\nA: {response}!")))
    ids = tiny_tokenizer()("Q: the film\nA: good!")["input_ids"]
    assert made.score(["the film"], ["good"]) == pytest.approx([own_score(folder, ids)], abs=1e-5)
    assert made.score(["the film"], ["good"]) != SequenceClassifier(folder).score(["the film"], ["good"])


def test_a_chat_template_is_the_reward_models_own_with_real_special_tokens(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    # Pad and end are two ids here: the model's own forward, compared with, would read before an end that is the pad id.
    folder = saved(tmp_path, tokenizer=tokenizer, pad_token_id=0)
    made = SequenceClassifier(folder, reading=ChatReading())
    plain = [tiny_tokenizer()(text)["input_ids"] for text in ("user: the film", "assistant: good")]
    ids = [1, *plain[0], 2, 1, *plain[1], 2]
    assert made.score(["the film"], ["good"]) == pytest.approx([own_score(folder, ids)], abs=1e-5)


def test_a_text_that_spells_a_special_token_has_no_score_under_a_chat_template(tmp_path: Path) -> None:
    """It could end its turn and speak for the other side."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    made = SequenceClassifier(saved(tmp_path, tokenizer=tokenizer), reading=ChatReading())
    results = made.score(["the", "a</s>", "the", "forbidden"], ["film", "film", "</s><s>user: good", "film"])
    assert isinstance(results[0], float)
    assert [each.reason for each in results if isinstance(each, Unusable)] == ["control_token"] * 2 + ["error"]
    assert results[2] == Unusable("control_token", "the text spells the special token '</s>'")


def test_a_chat_template_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no chat template"):
        SequenceClassifier(saved(tmp_path), reading=ChatReading())


def test_a_spec_says_how_the_text_is_made() -> None:
    def read(**fields: object) -> object:
        reading = reading_of(Scorer(kind="sequence_classifier", model="/x", **fields))
        return reading._template.filled("p", "r") if isinstance(reading, TextReading) else type(reading)

    assert read() == "pr"
    assert read(template="{response}<{prompt}>") == "r<p>"
    assert read(chat_template=True) is ChatReading


def test_what_is_not_begun_when_the_time_is_up_has_no_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = SequenceClassifier(saved(tmp_path), timeout_s=10.0)
    monkeypatch.setattr(sequence_classifier, "BATCH_TOKENS", 1)  # a pass for each text
    seconds = iter([0.0, 1.0, 9.0, 10.0])
    monkeypatch.setattr(sequence_classifier.time, "monotonic", lambda: next(seconds))
    results = made.score(["the"] * 4, [" film is good", " film", "", " film is"])
    assert [each.reason if isinstance(each, Unusable) else "score" for each in results] == [
        "timeout", "score", "score", "timeout",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "read"),
    [("a\ud800b", "a\ufffdb"), ("\udc00", "\ufffd"), ("\ud83d\ude00", "\U0001f600"), ("ä\x00", "ä\x00")],
)
def test_half_a_surrogate_pair_is_read_as_the_replacement_character(tmp_path: Path, text: str, read: str) -> None:
    assert whole(text) == read
    made = SequenceClassifier(saved(tmp_path))
    assert made.score(["the"], [text]) == made.score(["the"], [read])
