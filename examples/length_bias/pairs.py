"""Pairs of texts and which of the two the raters chose. Knows words and ratings, no tokens and no models."""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from examples.length_bias.settings import PairSettings, RaterSettings
from examples.reviews.corpus import Review


@dataclass(frozen=True)
class Text:
    """A text, the mean rating of the words in it, how many words it has, and whether it ends where a review ends."""

    text: str
    rating: float
    num_words: int
    finished: bool


@dataclass(frozen=True)
class Pair:
    """What the raters chose, and what they did not."""

    chosen: Text
    rejected: Text


@dataclass(frozen=True)
class Draft:
    """Some reviews after each other: words with their review's rating, and after how many words a review ends."""

    words: list[tuple[str, float]]
    ends: list[int]

    def cut(self, num: int) -> Text:
        """The first `num` words."""
        kept = self.words[:num]
        return Text(
            " ".join(word for word, _ in kept), sum(rating for _, rating in kept) / num, num, finished=num in self.ends
        )


def draft(reviews: Sequence[Review]) -> Draft:
    """Put reviews after each other."""
    words = [(word, review.rating) for review in reviews for word in review.text.split()]
    return Draft(words, list(itertools.accumulate(len(review.text.split()) for review in reviews)))


def make_pairs(
    reviews: list[Review], num: int, settings: PairSettings, raters: RaterSettings, *, same_length: bool, seed: int
) -> list[Pair]:
    """Seeded pairs. A share of the texts is finished, each other one is cut off at a word of its own.

    With `same_length` both of a pair are cut off at one: then length tells nothing about what was chosen, however much
    the raters like it.
    """
    rng = random.Random(seed)

    def a_draft() -> Draft:
        return draft(rng.choices(reviews, k=rng.randint(1, settings.max_parts)))

    def anywhere(longest: int) -> int:
        longest = min(longest, settings.max_words)
        return rng.randint(min(settings.min_words, longest), longest)

    def length(of: Draft) -> int:
        ends = [end for end in of.ends if end <= settings.max_words]
        return rng.choice(ends) if ends and rng.random() < settings.finished_share else anywhere(len(of.words))

    pairs = []
    for _ in range(num):
        first, second = a_draft(), a_draft()
        if same_length:
            lengths = [anywhere(min(len(first.words), len(second.words)))] * 2
        else:
            lengths = [length(first), length(second)]
        pairs.append(choose(first.cut(lengths[0]), second.cut(lengths[1]), raters, rng))
    return pairs


def choose(first: Text, second: Text, raters: RaterSettings, rng: random.Random) -> Pair:
    """What one rater makes of two texts.

    Source: the Bradley-Terry model, Bradley and Terry 1952, Biometrika 39, 324-345.
    """
    lead = raters.rating_weight * (first.rating - second.rating)
    lead += raters.word_weight * (first.num_words - second.num_words)
    lead += raters.finished_weight * (first.finished - second.finished)
    takes_first = rng.random() < 1 / (1 + math.exp(-lead))
    return Pair(first, second) if takes_first else Pair(second, first)
