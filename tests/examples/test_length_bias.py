"""The length-bias example's pairs and reward models, on a tiny made-up corpus."""

from __future__ import annotations

import io
import math
import random
import statistics
from collections import Counter
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from examples.length_bias.pairs import Text, choose, draft, make_pairs
from examples.length_bias.prepare import prepare
from examples.length_bias.reward_model import pair_batches, slopes
from examples.length_bias.settings import PairSettings, PreferenceSettings, RaterSettings, Settings
from examples.reviews.corpus import Review
from examples.reviews.training import Example
from tests.examples.test_reviews_prepare import tiny_settings

REVIEWS = [Review(" ".join(["word"] * (5 + number % 20)), (number % 9) - 4.0) for number in range(60)]
RATERS = RaterSettings(word_weight=0.06)


@pytest.mark.parametrize(
    ("raters", "better", "worse"),
    [
        (RaterSettings(0.5, 0.05), Text("a", 2.0, 30, True), Text("b", 1.0, 20, True)),
        (RaterSettings(0.25, 0.0, 0.5), Text("a", 2.0, 10, True), Text("b", 0.0, 40, False)),
    ],
    ids=["longer", "finished"],
)
def test_raters_choose_by_rating_length_and_end(raters: RaterSettings, better: Text, worse: Text) -> None:
    """0.5 x 1 + 0.05 x 10, and 0.25 x 2 + 0.5, are log-odds of 1: e / (1 + e) = 0.731."""
    rng = random.Random(1)
    wins = sum(choose(worse, better, raters, rng).chosen is better for _ in range(4000))
    assert wins / 4000 == pytest.approx(1 / (1 + math.exp(-1)), abs=0.03)


def test_a_cut_text_has_the_rating_of_the_words_that_are_left() -> None:
    reviews = draft([Review("a b", 1.0), Review("c", -2.0), Review("d e", 4.0)])
    assert reviews.cut(3) == Text("a b c", 0.0, 3, True)
    assert reviews.cut(4) == Text("a b c d", 1.0, 4, False)
    assert reviews.cut(5).finished


def test_a_share_of_the_texts_is_finished() -> None:
    """Half of them on purpose, and of the others those that happen to be cut where a review ends."""
    pairs = make_pairs(REVIEWS, 400, PairSettings(), RaterSettings(), same_length=False, seed=3)
    finished = statistics.fmean(text.finished for pair in pairs for text in (pair.chosen, pair.rejected))
    assert 0.5 <= finished < 0.65
    assert all(text.num_words <= 60 for pair in pairs for text in (pair.chosen, pair.rejected))


def test_pairs_of_one_length_say_nothing_about_length() -> None:
    free = make_pairs(REVIEWS, 400, PairSettings(), RATERS, same_length=False, seed=3)
    equal = make_pairs(REVIEWS, 400, PairSettings(), RATERS, same_length=True, seed=3)
    assert all(pair.chosen.num_words == pair.rejected.num_words for pair in equal)
    assert len(Counter(pair.chosen.num_words for pair in equal)) > 20
    leads = [pair.chosen.num_words - pair.rejected.num_words for pair in free]
    assert statistics.fmean(leads) > 3
    assert make_pairs(REVIEWS, 400, PairSettings(), RATERS, same_length=False, seed=3) == free


def test_a_batch_holds_whole_pairs_the_chosen_first() -> None:
    pairs = [(Example([1, number] * (number + 1)), Example([2, number])) for number in range(10)]
    batches = pair_batches(pairs, 60, seed=1)
    seen = []
    for batch in batches:
        chosen, rejected = batch.input_ids.chunk(2)
        assert chosen[:, 0].eq(1).all()
        assert rejected[:, 0].eq(2).all()
        assert torch.equal(chosen[:, 1], rejected[:, 1])
        assert batch.input_ids.numel() <= 60
        seen += chosen[:, 1].tolist()
    assert sorted(seen) == list(range(10))


def test_slopes_are_those_of_the_plane() -> None:
    texts = [
        Text("", float(rating), words, finished)
        for rating in (-1, 0, 2)
        for words in (5, 10, 40)
        for finished in (False, True)
    ]
    scores = [3 + 0.5 * text.rating + 0.02 * text.num_words - 0.3 * text.finished for text in texts]
    found = {"score_per_rating": 0.5, "score_per_ten_words": 0.2, "score_per_end": -0.3}
    assert slopes(texts, scores) == pytest.approx(found)


def test_reward_models_and_judges_are_made_and_load(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    settings = Settings(
        reviews=tiny_settings(cache),
        pairs=PairSettings(num_pairs=60, num_held_out=20, max_words=30),
        preference=PreferenceSettings(epochs=1, tokens_per_batch=512),
    )
    figures = prepare(tmp_path / "out", cache, Console(file=io.StringIO()), settings)
    assert {"biased_reward_model_score_per_ten_words", "judge_model_score_per_end"} <= figures.keys()
    for name in ("biased_reward_model", "controlled_reward_model", "judge_model", "fond_judge_model"):
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / name)
        assert model.config.num_labels == 1
        ids = AutoTokenizer.from_pretrained(tmp_path / "out" / name)("a film")["input_ids"]
        assert ids[-1] == 2, "the score is read at an eos"
    assert (tmp_path / "out/policy").is_dir()
    assert not (tmp_path / "out/reward_model").exists()
