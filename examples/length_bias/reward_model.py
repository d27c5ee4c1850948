"""Reward models that were trained on ratings, as in the reviews example, and learn what raters chose."""

import random
import shutil
import statistics
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForSequenceClassification

from examples.length_bias.pairs import Pair, Text
from examples.length_bias.settings import PreferenceSettings
from examples.reviews.progress import Wait
from examples.reviews.reward_model import score_texts, scores_of
from examples.reviews.tokenizer import PAD_ID, encode
from examples.reviews.training import Batch, Example, collate, train_epochs


def pair_batches(pairs: list[tuple[Example, Example]], tokens_per_batch: int, seed: int) -> list[Batch]:
    """Batches of 2n rows: the chosen texts of n pairs, then the rejected ones. Pairs of like length go together."""
    rng = random.Random(seed)

    def longest(index: int) -> int:
        return max(len(example.token_ids) for example in pairs[index])

    groups: list[list[int]] = []
    for index in sorted(range(len(pairs)), key=lambda index: (longest(index), rng.random())):
        if not groups or 2 * (len(groups[-1]) + 1) * longest(index) > tokens_per_batch:
            groups.append([])
        groups[-1].append(index)
    rng.shuffle(groups)
    return [collate([pairs[index][side] for side in (0, 1) for index in group], PAD_ID) for group in groups]


def preference_loss(model: LlamaForSequenceClassification, batch: Batch) -> Tensor:
    """Mean of -log sigmoid(score of the chosen - score of the rejected) over the pairs of a batch.

    Source: Ouyang et al. 2022, arXiv:2203.02155, equation 1.
    """
    chosen, rejected = scores_of(model, batch).chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


def train_on_pairs(
    pairs: list[Pair], held_out: list[Pair], start: Path, settings: PreferenceSettings, folder: Path, wait: Wait
) -> dict[str, float]:
    """Train, save in Hugging Face form into `folder`, and return the figures on pairs never trained on."""
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(start / file, folder)
    torch.manual_seed(settings.seed)
    model = LlamaForSequenceClassification.from_pretrained(start)
    chosen, rejected = (
        [Example(ids) for ids in encode(folder, texts)]
        for texts in ([pair.chosen.text for pair in pairs], [pair.rejected.text for pair in pairs])
    )
    examples = list(zip(chosen, rejected, strict=True))
    wait.start(2 * len(pairs) * settings.epochs)
    train_epochs(
        model,
        [
            lambda epoch=epoch: pair_batches(examples, settings.tokens_per_batch, settings.seed + epoch)
            for epoch in range(settings.epochs)
        ],
        lambda batch: preference_loss(model, batch),
        peak_lr=settings.peak_lr,
        weight_decay=settings.weight_decay,
        folder=folder,
        on_epoch=lambda done: wait.at(2 * len(pairs) * done),
        on_batch=lambda _, count, loss: wait.advance(count, f"loss {loss:.2f}"),
    )
    model.save_pretrained(folder)
    return figures(model, folder, held_out)


def figures(model: LlamaForSequenceClassification, folder: Path, held_out: list[Pair]) -> dict[str, float]:
    """How often the model agrees with the raters, and what a rating's and a length's difference is worth to it."""
    chosen = score_texts(model, folder, [pair.chosen.text for pair in held_out])
    rejected = score_texts(model, folder, [pair.rejected.text for pair in held_out])
    agreement = statistics.fmean(a > b for a, b in zip(chosen, rejected, strict=True))
    texts = [text for pair in held_out for text in (pair.chosen, pair.rejected)]
    scores = [score for both in zip(chosen, rejected, strict=True) for score in both]
    told = {"agreement": agreement, **slopes(texts, scores)}
    return {name: round(value, 3) for name, value in told.items()}


def slopes(texts: list[Text], scores: list[float]) -> dict[str, float]:
    """Least squares of the score: what a point of rating is worth, what ten words are, and what an end is."""
    columns = [
        [1.0] * len(texts),
        [text.rating for text in texts],
        [text.num_words / 10 for text in texts],
        [float(text.finished) for text in texts],
    ]
    design = torch.tensor(columns, dtype=torch.float64).T
    solution = torch.linalg.lstsq(design, torch.tensor(scores, dtype=torch.float64)[:, None]).solution[1:, 0]
    names = ("score_per_rating", "score_per_ten_words", "score_per_end")
    return dict(zip(names, solution.tolist(), strict=True))
