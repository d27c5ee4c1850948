"""Pre-training of the policy that PPO will tune: a small Llama on sentences of all kinds, then on film reviews."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from examples.reviews.corpus import Corpus
from examples.reviews.progress import Wait
from examples.reviews.settings import ModelShape, PolicySettings
from examples.reviews.tokenizer import BOS_ID, EOS_ID, PAD_ID, encode
from examples.reviews.training import Batch, Example, collate, length_batches, train_epochs


def llama_config(shape: ModelShape, vocab_size: int) -> LlamaConfig:
    """The shape of both the policy and the reward model."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_heads,
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=True,
        attention_dropout=0.0,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )


def with_eos(tokenizer_folder: Path, texts: list[str]) -> list[Example]:
    """bos, the text, eos: how every pre-training text looks."""
    return [Example([*ids, EOS_ID]) for ids in encode(tokenizer_folder, texts)]


def language_loss(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """Mean cross-entropy of the next token, over real tokens."""
    logits = model(input_ids=batch.input_ids[:, :-1], use_cache=False).logits
    targets = batch.input_ids[:, 1:]
    beyond = torch.arange(targets.shape[1])[None, :] >= batch.lengths[:, None] - 1
    return F.cross_entropy(logits.flatten(0, 1), targets.masked_fill(beyond, -100).flatten())


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, examples: list[Example]) -> float:
    """Nats per token on texts never trained on."""
    total, tokens = 0.0, 0
    for start in range(0, len(examples), 64):
        batch = collate(sorted(examples, key=lambda e: len(e.token_ids))[start : start + 64], PAD_ID)
        count = int((batch.lengths - 1).sum())
        total += float(language_loss(model, batch)) * count
        tokens += count
    return total / tokens


def pretrain(corpus: Corpus, settings: PolicySettings, folder: Path, wait: Wait) -> dict[str, float]:
    """Train with the tokenizer in `folder`, save beside it in Hugging Face form, and return the figures."""
    torch.manual_seed(settings.seed)
    vocab_size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    model = LlamaForCausalLM(llama_config(settings.shape, vocab_size))
    reviews = with_eos(folder, [review.text for review in corpus.train])
    everything = reviews + with_eos(folder, corpus.others)
    epochs = [everything] * settings.epochs_all + [reviews] * settings.epochs_reviews
    wait.start(sum(map(len, epochs)))
    train_epochs(
        model,
        [
            lambda number=number, examples=examples: length_batches(
                examples, settings.tokens_per_batch, PAD_ID, settings.seed + number
            )
            for number, examples in enumerate(epochs)
        ],
        lambda batch: language_loss(model, batch),
        peak_lr=settings.peak_lr,
        weight_decay=settings.weight_decay,
        folder=folder,
        on_epoch=lambda done: wait.at(sum(map(len, epochs[:done]))),
        on_batch=lambda _, count, loss: wait.advance(count, f"loss {loss:.2f}"),
    )
    loss = held_out_loss(model, with_eos(folder, [review.text for review in corpus.held_out]))
    # Sampling settings are the run spec's business; the folder says only how a text starts, ends and is padded.
    model.generation_config = GenerationConfig(pad_token_id=PAD_ID, bos_token_id=BOS_ID, eos_token_id=EOS_ID)
    model.save_pretrained(folder)
    return {"parameters": model.num_parameters(), "held_out_loss": round(loss, 4)}
