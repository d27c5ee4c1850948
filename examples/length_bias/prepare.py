"""Prepare the length-bias example: `python -m examples.length_bias.prepare`.

The reviews example's sentences, tokenizer, policy and prompts (kept in its cache, and made once for both), and of each
half of the reviews a model of its human ratings, from which start

    biased_reward_model      the first half, as pairs of texts of any length, chosen by raters who like length
    controlled_reward_model  the first half as pairs of equal length, chosen by the same raters
    judge_model              the other half, as pairs chosen by raters who care for content and whether it is finished
    fond_judge_model         the other half, as pairs chosen by raters who like length: answers are to be long

Nothing that a judge learned from was shown to a reward model.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from examples.length_bias.pairs import make_pairs
from examples.length_bias.settings import RaterSettings, Settings
from examples.reviews.corpus import Corpus, read_corpus
from examples.reviews.prepare import DEFAULT_OUT as REVIEWS_OUT
from examples.reviews.prepare import build, command
from examples.reviews.prepare import plan as plan_reviews
from examples.reviews.progress import Wait
from examples.reviews.stages import Stage

DEFAULT_OUT = Path(__file__).parent / "prepared"
MODELS = ("policy", "biased_reward_model", "controlled_reward_model", "judge_model", "fond_judge_model")


def plan(settings: Settings, cache: Path) -> list[Stage]:
    """The stages, each behind those it needs."""
    shared = {stage.name: stage for stage in plan_reviews(settings.reviews, cache) if stage.name != "reward_model"}
    corpus, policy = shared["corpus"], shared["policy"]

    def half(which: int) -> Corpus:
        """Every other review; all held-out ones."""
        texts = read_corpus(corpus.folder(cache))
        return replace(texts, train=texts.train[which::2])

    def rated(kind: str, which: int) -> Stage:
        def train(folder: Path, wait: Wait) -> dict[str, Any]:
            from examples.reviews.reward_model import train_reward_model

            figures = train_reward_model(half(which), policy.folder(cache), settings.reviews.reward_model, folder, wait)
            return {f"{kind}_{figure}": value for figure, value in figures.items()}

        return Stage(
            f"{kind}_model", kind.replace("_", " ").capitalize(), (settings.reviews.reward_model,), (policy,), train
        )

    ratings = (rated("rating", 0), rated("other_rating", 1))

    def preference(name: str, which: int, raters: RaterSettings, same_length: bool = False) -> Stage:
        def train(folder: Path, wait: Wait) -> dict[str, Any]:
            from examples.length_bias.reward_model import train_on_pairs

            texts, pairs = half(which), settings.pairs
            trained = make_pairs(
                texts.train, pairs.num_pairs, pairs, raters, same_length=same_length, seed=pairs.seed + which
            )
            # Of any length for all: on equal lengths a bias could not be seen.
            held_out = make_pairs(
                texts.held_out, pairs.num_held_out, pairs, raters, same_length=False, seed=pairs.seed + 2
            )
            start = ratings[which].folder(cache)
            figures = train_on_pairs(trained, held_out, start, settings.preference, folder, wait)
            return {f"{name}_{figure}": value for figure, value in figures.items()}

        title = name.removesuffix("_model").replace("_", " ").capitalize()
        return Stage(name, title, (raters, settings.pairs, settings.preference), (ratings[which],), train)

    return [
        *shared.values(),
        *ratings,
        preference("biased_reward_model", 0, settings.raters),
        preference("judge_model", 1, settings.careful_raters),
        preference("fond_judge_model", 1, settings.raters),
        preference("controlled_reward_model", 0, settings.raters, same_length=True),
    ]


def prepare(out: Path, cache: Path, console: Console, settings: Settings | None = None) -> dict[str, Any]:
    """Build what is missing, put it into `out`, and return all figures.

    Raises:
        DownloadError, CorpusError: with a message in one line that names the remedy.
    """
    return build(plan(settings or Settings(), cache), MODELS, out, cache, console)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    return command("length_bias", DEFAULT_OUT, prepare, arguments, REVIEWS_OUT / "cache")


if __name__ == "__main__":
    sys.exit(main())
