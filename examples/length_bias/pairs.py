"""Pairs of texts and which of the two the raters chose. Knows words and ratings, no tokens and no models."""

import math
import random
from dataclasses import dataclass

from examples.length_bias.settings import PairSettings, RaterSettings
from examples.reviews.corpus import Review


@dataclass(frozen=True)
class Text:
    """A text, the mean rating of the words in it, and how many words it has."""

    text: str
    rating: float
    num_words: int


@dataclass(frozen=True)
class Pair:
    """What the raters chose, and what they did not."""

    chosen: Text
    rejected: Text


Words = list[tuple[str, float]]


def draw_words(reviews: list[Review], settings: PairSettings, rng: random.Random) -> Words:
    """The words of some reviews after each other, each with its review's rating."""
    parts = rng.choices(reviews, k=rng.randint(1, settings.max_parts))
    return [(word, part.rating) for part in parts for word in part.text.split()][: settings.max_words]


def cut(words: Words, num: int) -> Text:
    """The first `num` words as a text."""
    kept = words[:num]
    return Text(" ".join(word for word, _ in kept), sum(rating for _, rating in kept) / num, num)


def make_pairs(
    reviews: list[Review], num: int, settings: PairSettings, raters: RaterSettings, *, same_length: bool, seed: int
) -> list[Pair]:
    """Seeded pairs, each text cut off at a word of its own; with `same_length` both at one.

    Then length tells nothing about what was chosen, however much the raters like it.
    """
    rng = random.Random(seed)

    def length_up_to(longest: int) -> int:
        return rng.randint(min(settings.min_words, longest), longest)

    pairs = []
    for _ in range(num):
        first, second = draw_words(reviews, settings, rng), draw_words(reviews, settings, rng)
        if same_length:
            lengths = [length_up_to(min(len(first), len(second)))] * 2
        else:
            lengths = [length_up_to(len(first)), length_up_to(len(second))]
        pairs.append(choose(cut(first, lengths[0]), cut(second, lengths[1]), raters, rng))
    return pairs


def choose(first: Text, second: Text, raters: RaterSettings, rng: random.Random) -> Pair:
    """What one rater makes of two texts.

    Source: the Bradley-Terry model, Bradley and Terry 1952, Biometrika 39, 324-345.
    """
    lead = raters.rating_weight * (first.rating - second.rating)
    lead += raters.word_weight * (first.num_words - second.num_words)
    takes_first = rng.random() < 1 / (1 + math.exp(-lead))
    return Pair(first, second) if takes_first else Pair(second, first)
