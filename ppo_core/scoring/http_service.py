"""A scorer behind an address: prompts and responses are posted in batches, scores come back, all by one deadline.

The request is `{"prompts": [...], "responses": [...]}`, the answer `{"scores": [...]}` of the same length; see
docs/reward-sources.md. A batch that fails costs the scores of its own responses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from ppo_core.scoring.http_post import Failure, HttpPost, Limits
from ppo_core.scoring.source import Unusable, not_asked_to_end

# Requests under way at the same time.
MAX_AT_ONCE = 4


class HttpService:
    """One service.

    Args:
        post: what posts to it.
        batch_size: responses in one request.
    """

    def __init__(self, post: HttpPost, batch_size: int) -> None:
        self._post, self._batch_size = post, batch_size

    @classmethod
    def of(
        cls, url: str, batch_size: int, retries: int, timeout_s: float, environment: Mapping[str, str]
    ) -> HttpService:
        """The service at `url`, as far as the environment allows it.

        Args:
            retries: further tries of a request that failed in a way that may pass.
            timeout_s: seconds that all requests of one call may take, tries and waits included.

        Raises:
            DataError: the host is not allowed, or its token is missing or malformed.
        """
        return cls(HttpPost.of(url, Limits(MAX_AT_ONCE, retries, timeout_s), environment), batch_size)

    def score(
        self, prompts: Sequence[str], responses: Sequence[str], check: Callable[[], None] = not_asked_to_end
    ) -> list[object]:
        """See `RewardSource`; returns at the latest when `timeout_s` is over."""
        batches = [slice(start, start + self._batch_size) for start in range(0, len(responses), self._batch_size)]
        # Escaped to ASCII: half a surrogate pair, which no UTF-8 can carry, goes as \ud800.
        contents = [
            json.dumps({"prompts": list(prompts[rows]), "responses": list(responses[rows])}).encode("ascii")
            for rows in batches
        ]
        results: list[object] = []
        for rows, answer in zip(batches, self._post.post(contents, check), strict=True):
            num_rows = len(responses[rows])
            found = answer if isinstance(answer, Failure) else scores_of(answer, num_rows)
            results += [Unusable(found.reason, found.detail)] * num_rows if isinstance(found, Failure) else found
        return results

    def close(self) -> None:
        self._post.close()


def scores_of(body: bytes, num_rows: int) -> list[object] | Failure:
    """The scores in an answer, not yet looked at one by one."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        return Failure("bad_answer", f"the answer is no JSON: {error}", None)
    scores = answer.get("scores") if isinstance(answer, dict) else None
    if not isinstance(scores, list):
        return Failure("bad_answer", 'the answer is no object with a list under "scores"', None)
    if len(scores) != num_rows:
        return Failure("wrong_count", f"{len(scores)} scores for {num_rows} responses", None)
    return scores
