"""How varied the responses of one iteration are: counts over token ids and words, without tensors.

Responses are token ids as generated, end-of-text included. Where nothing can be counted the result is None, not 0.
It knows neither tokenizer nor scores.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

_WORD = re.compile(r"\w+(?:['’]\w+)*")


def distinct_2(responses: Sequence[Sequence[int]]) -> float | None:
    """Distinct pairs of neighbouring tokens / all such pairs, over all responses together.

    Example: 1 2 1 2 and 1 2 hold the pairs 12 21 12 12: 2 of 4 are distinct, 0.5.
    """
    pairs = [pair for ids in responses for pair in pairwise(ids)]
    return len(set(pairs)) / len(pairs) if pairs else None


def repeat_3(responses: Sequence[Sequence[int]]) -> float | None:
    """Runs of three tokens that stood earlier in the same response / all runs of three, over all responses.

    Example: 1 2 3 1 2 3 holds 123 231 312 123: 1 of 4 repeats, 0.25.
    """
    num_runs = num_repeats = 0
    for ids in responses:
        runs = list(zip(ids, ids[1:], ids[2:], strict=False))
        num_runs += len(runs)
        num_repeats += len(runs) - len(set(runs))
    return num_repeats / num_runs if num_runs else None


def identical(responses: Sequence[Sequence[int]]) -> float | None:
    """Share of responses whose token ids equal those of another response.

    Example: of a, b, a, a, c three have a twin, 0.6.
    """
    counts = Counter(tuple(ids) for ids in responses)
    return sum(count for count in counts.values() if count > 1) / len(responses) if responses else None


def words(text: str) -> list[str]:
    """The words of a text in lower case: runs of letters and digits, with inner apostrophes."""
    return _WORD.findall(text.lower())


def distinct_word_share(texts: Sequence[str], num_words: int | None = None) -> float | None:
    """Distinct words / all words, over all texts together.

    The share falls with the number of words, so two sets are compared at the same `num_words`: only the first so many
    are counted. None where there are fewer.
    """
    found = [word for text in texts for word in words(text)]
    if not found or (num_words is not None and (num_words < 1 or len(found) < num_words)):
        return None
    counted = found[:num_words]
    return len(set(counted)) / len(counted)


def most_common_share(texts: Sequence[str]) -> float | None:
    """Share of the texts that the most frequent one makes up, white space at the ends aside."""
    counts = Counter(text.strip() for text in texts)
    return max(counts.values()) / len(texts) if texts else None
