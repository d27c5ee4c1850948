"""The seam to whatever generates responses: token ids in, token ids out, weights synced and verified.

An engine knows no text, no reward and no loss. Its word decides what a response is: how long, and why it ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from ppo_core.models.token_sets import TokenSets
from ppo_core.rollout.weights import PolicyWeights, Probe

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Response:
    """What was generated for one prompt.

    `ids` hold the stop token, if one ended the response. `finish_reason` is "stop" where a stop id or stop string
    ended it, "length" where it was cut off. `logprobs` are the engine's own, one a token, of the distribution it
    sampled from: a thing to measure, never the old logprobs of an update. Empty ids are legal.
    `token_sets` say for each token which ids could be drawn; None where all could.
    """

    ids: list[int]
    finish_reason: FinishReason
    logprobs: list[float]
    token_sets: TokenSets | None = None


@dataclass(frozen=True)
class SyncReport:
    """A weight sync that was verified.

    `digest` is that of the weights the engine holds; `probe_gap` the largest difference, in nats, between the
    engine's and the trainer's logprobs of a fixed probe.
    """

    version: int
    digest: str
    probe_gap: float


class RolloutEngine(Protocol):
    """One sampler of the policy. Settings of sampling belong to the engine and are exactly the spec's."""

    @property
    def version(self) -> int:
        """The policy version whose weights it holds; 0 is the starting policy."""
        ...

    @property
    def rows_at_once(self) -> int | None:
        """How many rows are generated at once since it ran out of memory; None as long as it did not."""
        ...

    def generate(
        self, prompt_ids: list[list[int]], *, seeds: list[int], check: Callable[[], None] | None = None
    ) -> list[Response]:
        """One response a prompt, in order.

        Args:
            prompt_ids: the prompts, none of them empty; used as they are.
            seeds: one a row. A row's response depends on its prompt, its seed and the weights alone, not on the rows
                beside it.
            check: called before every generation step; what it raises ends the generation.

        Raises:
            RolloutError: an empty prompt, or prompts and seeds of different number.
        """
        ...

    def sync_weights(self, weights: PolicyWeights, probe: Probe, version: int) -> SyncReport:
        """Take over the policy's weights as `version`, and prove it.

        Args:
            weights: iterated to the end, whatever happens.
            probe: what the trainer says of fixed tokens with these weights.
            version: counts the updates of the policy.

        Raises:
            WeightSyncError: the engine does not hold what was sent; the message has both digests or the probe's gap.
        """
        ...

    def rest(self) -> None:
        """Nothing is asked of it before the next sync: it may give its memory up until then."""
        ...

    def close(self) -> None:
        """End what it runs beside the trainer; harmless when repeated."""
        ...
