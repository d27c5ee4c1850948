"""Every number of the length-bias example's preparation, in one place and without torch.

It builds on the reviews example: the same sentences, tokenizer, policy and prompts. Only the reward models are its own.
"""

from dataclasses import dataclass, field

from examples.reviews.settings import Settings as ReviewsSettings


@dataclass(frozen=True)
class RaterSettings:
    """What raters who compare two texts go by.

    The log-odds of choosing the first are `rating_weight` times its lead in human rating (-4 to 4), plus `word_weight`
    times its lead in words, plus `finished_weight` where it alone ends where a review ends, minus that where it alone
    does not.
    """

    rating_weight: float = 1.5
    word_weight: float = 0.0
    finished_weight: float = 0.0


@dataclass(frozen=True)
class PairSettings:
    """Pairs of texts that the raters compare: one to `max_parts` reviews after each other, cut off anywhere."""

    num_pairs: int = 3_000
    num_held_out: int = 1_000
    max_parts: int = 4
    min_words: int = 4
    max_words: int = 60
    finished_share: float = 0.5
    seed: int = 19


@dataclass(frozen=True)
class PreferenceSettings:
    """Training of a reward model on the pairs."""

    epochs: int = 1
    tokens_per_batch: int = 2048
    peak_lr: float = 3e-4
    weight_decay: float = 0.1
    seed: int = 23


@dataclass(frozen=True)
class Settings:
    """The whole preparation."""

    reviews: ReviewsSettings = field(default_factory=ReviewsSettings)
    raters: RaterSettings = RaterSettings(word_weight=0.03)  # as people who compare texts do, they take the longer one
    careful_raters: RaterSettings = RaterSettings(finished_weight=4.0)
    pairs: PairSettings = field(default_factory=PairSettings)
    preference: PreferenceSettings = field(default_factory=PreferenceSettings)
