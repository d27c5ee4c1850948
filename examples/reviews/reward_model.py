"""The reward model: the policy's trunk, tuned to give the human ratings of film reviews, from -4 to 4."""

import random
import statistics
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForSequenceClassification

from examples.reviews.corpus import Corpus, Review
from examples.reviews.progress import Wait
from examples.reviews.settings import RewardSettings
from examples.reviews.tokenizer import PAD_ID, encode, save_reading_copy
from examples.reviews.training import Batch, Example, collate, length_batches, train_epochs


def spoil(text: str, rng: random.Random, kind: str) -> str:
    """The text shuffled, or with one to three of its words repeated."""
    words = text.split()
    if kind == "shuffled":
        rng.shuffle(words)
        return " ".join(words)
    start = rng.randrange(len(words))
    phrase = words[start : start + rng.randint(1, 3)]
    if rng.random() < 0.6:  # one after the other: "truly truly truly"
        words[start:start] = phrase * rng.randint(1, 4)
    else:  # strewn over the text
        for _ in range(rng.randint(2, 5)):
            at = rng.randint(0, len(words))
            words[at:at] = phrase
    return " ".join(words)


def cut(text: str, rng: random.Random) -> tuple[str, float]:
    """An opening of the text, at least four words, closed with a full stop half the time; and the share cut away."""
    words = text.split()
    kept = rng.randint(min(4, len(words)), len(words))
    opening = " ".join(words[:kept])
    if kept < len(words) and rng.random() < 0.5:
        opening = opening.rstrip(".,;:-") + "."
    return opening, 1 - kept / len(words)


def epoch_texts(
    reviews: list[Review], targets: list[float], settings: RewardSettings, epoch: int
) -> tuple[list[str], list[float]]:
    """One epoch's texts and targets: every review whole or cut, and a share of them spoilt besides."""
    rng = random.Random(settings.seed * 1000 + epoch)
    texts, wanted = [], []
    for review, target in zip(reviews, targets, strict=True):
        text, missing = cut(review.text, rng) if rng.random() < settings.share_cut else (review.text, 0.0)
        texts.append(text)
        wanted.append(target - settings.cut_drop * missing)
        for kind, share in (("shuffled", settings.share_shuffled), ("repeated", settings.share_repeated)):
            if rng.random() < share:
                texts.append(spoil(review.text, rng, kind))
                wanted.append(min(target, 0.0) - settings.spoilt_drop)
    return texts, wanted


def scores_of(model: LlamaForSequenceClassification, batch: Batch) -> Tensor:
    """[B] scores, read at each row's last token; the same as the `logits[:, 0]` of the whole model."""
    hidden = model.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    return model.score(hidden[torch.arange(len(batch.lengths)), batch.lengths - 1])[:, 0]


@torch.no_grad()
def score_texts(model: LlamaForSequenceClassification, tokenizer_folder: Path, texts: list[str]) -> list[float]:
    """A score for each text."""
    scores: list[float] = []
    rows = [Example(ids) for ids in encode(tokenizer_folder, texts)]
    for start in range(0, len(rows), 64):
        scores += scores_of(model, collate(rows[start : start + 64], PAD_ID)).tolist()
    return scores


def train_reward_model(
    corpus: Corpus, policy_folder: Path, settings: RewardSettings, folder: Path, wait: Wait
) -> dict[str, float]:
    """Train, save in Hugging Face form into `folder`, and return the figures on held-out reviews."""
    save_reading_copy(policy_folder, folder)
    torch.manual_seed(settings.seed)
    model = LlamaForSequenceClassification.from_pretrained(policy_folder, num_labels=1)
    model.config.problem_type = "regression"
    ratings = [review.rating for review in corpus.train]
    mean, deviation = statistics.fmean(ratings), statistics.pstdev(ratings)
    targets = [(rating - mean) / deviation for rating in ratings]
    epochs = [epoch_texts(corpus.train, targets, settings, epoch) for epoch in range(settings.epochs)]

    def batches(epoch: int) -> list[Batch]:
        texts, wanted = epochs[epoch]
        examples = [Example(ids, target) for ids, target in zip(encode(folder, texts), wanted, strict=True)]
        return length_batches(examples, settings.tokens_per_batch, PAD_ID, settings.seed + epoch)

    wait.start(sum(len(texts) for texts, _ in epochs))
    train_epochs(
        model,
        [lambda epoch=epoch: batches(epoch) for epoch in range(settings.epochs)],
        lambda batch: F.mse_loss(scores_of(model, batch), batch.targets),
        peak_lr=settings.peak_lr,
        weight_decay=settings.weight_decay,
        folder=folder,
        on_epoch=lambda done: wait.at(sum(len(texts) for texts, _ in epochs[:done])),
        on_batch=lambda _, count, loss: wait.advance(count, f"squared error {loss:.2f}"),
    )
    # Trained on standardised ratings, used in the ratings' own unit; their mean is 0.005, so no bias is missed.
    with torch.no_grad():
        model.score.weight.mul_(deviation)
    model.save_pretrained(folder)
    return held_out_figures(model, folder, corpus.held_out, settings)


def held_out_figures(
    model: LlamaForSequenceClassification, folder: Path, reviews: list[Review], settings: RewardSettings
) -> dict[str, float]:
    """Correlation with the human ratings, and how far spoiling a well rated review lowers its score."""
    texts = [review.text for review in reviews]
    scores = score_texts(model, folder, texts)
    figures = {"correlation": statistics.correlation(scores, [review.rating for review in reviews])}
    rng = random.Random(settings.seed)
    liked = [(review.text, score) for review, score in zip(reviews, scores, strict=True) if review.rating > 1]
    figures["score_liked"] = statistics.fmean(score for _, score in liked)
    for kind in ("shuffled", "repeated"):
        spoilt = score_texts(model, folder, [spoil(text, rng, kind) for text, _ in liked])
        figures[f"score_liked_{kind}"] = statistics.fmean(spoilt)
    return {name: round(value, 3) for name, value in figures.items()}
