"""The example's judge: VADER's lexicon scorer. It shares nothing with the reward model: no data split, no weights."""

import re
from functools import lru_cache

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

# A sentence ends behind . ! or ? (closing quotes and brackets included) where white space follows, or at a line's end.
SENTENCE_END = re.compile(r"""(?<=[.!?])["')\]]*\s+|\n+""")


@lru_cache(maxsize=1)
def _analyzer() -> SentimentIntensityAnalyzer:
    """Reads the lexicon once a process."""
    return SentimentIntensityAnalyzer()


def vader_mean_sentence(text: str) -> float:
    """Mean of the compound scores, in [-1, 1], of the text's sentences; 0 for a text without words.

    The mean and not the sum, and sentence by sentence: VADER's compound of a whole text creeps towards 1 as the text
    grows, so a longer answer would win by its length.
    """
    sentences = [s for s in SENTENCE_END.split(text) if any(character.isalnum() for character in s)]
    if not sentences:
        return 0.0
    return sum(_analyzer().polarity_scores(s)["compound"] for s in sentences) / len(sentences)
