"""Every number of the reviews example's preparation, in one place and without torch.

A stage's cache key is a hash of its settings here, so a changed number makes that stage, and those behind it, again.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SourceSettings:
    """Which source distribution the texts come from, and where in it they lie."""

    package: str = "vaderSentiment"
    version: str = "3.3.2"
    sha256: str = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
    # The rated texts are a tar.gz inside the source distribution.
    archive: str = "additional_resources/hutto_ICWSM_2014.tar.gz"
    reviews: str = "movieReviewSnippets_GroundTruth.txt"
    others: tuple[str, ...] = (
        "amazonReviewSnippets_GroundTruth.txt",
        "nytEditorialSnippets_GroundTruth.txt",
        "tweets_GroundTruth.txt",
    )


@dataclass(frozen=True)
class CorpusSettings:
    """How sentences become a corpus, and which reviews nothing is trained on."""

    num_held_out: int = 600
    max_words: int = 60
    seed: int = 7


@dataclass(frozen=True)
class TokenizerSettings:
    """The byte-level BPE tokenizer, trained on the sentences that are trained on."""

    vocab_size: int = 2048
    min_frequency: int = 2


@dataclass(frozen=True)
class ModelShape:
    """A small Llama. Head width 32, no dropout, tied embeddings."""

    hidden_size: int = 192
    intermediate_size: int = 512
    num_layers: int = 3
    num_heads: int = 6
    max_positions: int = 256


@dataclass(frozen=True)
class PolicySettings:
    """Pre-training of the policy: sentences of all kinds first, film reviews after them."""

    shape: ModelShape = field(default_factory=ModelShape)
    epochs_all: int = 1
    epochs_reviews: int = 1
    tokens_per_batch: int = 1024
    peak_lr: float = 2e-3
    weight_decay: float = 0.1
    seed: int = 11


@dataclass(frozen=True)
class RewardSettings:
    """Regression of the reward model on the human ratings, and on spoilt reviews.

    A spoilt review is one that no person would praise: its words shuffled, or a few of them repeated. Its target lies
    `spoilt_drop` standard deviations below its rating or below neutral, whichever is lower, so that piling up
    favourite words does not pay. Few are shuffled: more would make the score one of grammar, which a small policy
    raises by breaking off early.
    """

    epochs: int = 2
    tokens_per_batch: int = 1024
    peak_lr: float = 1e-3
    weight_decay: float = 0.1
    share_cut: float = 0.3
    cut_drop: float = 0.8
    share_shuffled: float = 0.02
    share_repeated: float = 0.15
    spoilt_drop: float = 1.0
    seed: int = 13


@dataclass(frozen=True)
class PromptSettings:
    """Prompts are the opening words of reviews; held-out ones open reviews that nothing was trained on."""

    num_words: int = 4
    num_train: int = 4000
    num_held_out: int = 256
    min_review_words: int = 8
    seed: int = 17


@dataclass(frozen=True)
class Settings:
    """The whole preparation."""

    source: SourceSettings = field(default_factory=SourceSettings)
    corpus: CorpusSettings = field(default_factory=CorpusSettings)
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    policy: PolicySettings = field(default_factory=PolicySettings)
    reward_model: RewardSettings = field(default_factory=RewardSettings)
    prompts: PromptSettings = field(default_factory=PromptSettings)
