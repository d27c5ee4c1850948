"""What an engine says that it generated, compared with what it was asked for. It knows no engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ppo_core.errors import RolloutError
from ppo_core.rollout.engine import Response


@dataclass(frozen=True)
class Asked:
    """What every row was asked with."""

    num_tokens: int  #: ids that the model has
    max_new_tokens: int
    stop_ids: frozenset[int]
    has_stop_strings: bool

    def response(self, name: str, row: int, found: dict[str, Any]) -> Response:
        """What was found for a row.

        Raises:
            RolloutError: it cannot be the answer to what was asked.
        """
        ids, logprobs, reason = found["ids"], found["logprobs"], found["finish_reason"]
        said = f"{name} ended row {row} by {reason!r}"
        if reason not in ("stop", "length"):
            raise RolloutError(f"{said}; expected 'stop' or 'length'")
        beyond = [token for token in ids if not 0 <= token < self.num_tokens]
        if beyond:
            raise RolloutError(f"{name} drew id {beyond[0]} in row {row}, but the model has {self.num_tokens} ids")
        if len(ids) > self.max_new_tokens:
            raise RolloutError(f"{said} after {len(ids)} tokens; rollout.max_new_tokens is {self.max_new_tokens}")
        stops = [place for place, token in enumerate(ids) if token in self.stop_ids]
        if stops and (reason == "length" or stops[0] != len(ids) - 1):
            raise RolloutError(
                f"{said} after {len(ids)} tokens, but token {stops[0] + 1} is stop id {ids[stops[0]]}: it does not end "
                "responses where it was asked to"
            )
        if reason == "stop" and not stops and not self.has_stop_strings:
            raise RolloutError(f"{said} after {len(ids)} tokens, none of which is a stop id")
        if not torch.tensor(logprobs).isfinite().all():
            raise RolloutError(
                f"{name}, row {row}: its logits are not finite, so nothing can be sampled from them",
                hint="Go back to a checkpoint before the weights became non-finite; lower update.learning_rate.",
            )
        return Response(ids, reason, logprobs)


def in_order(
    name: str, rows: list[int], prompt_ids: list[list[int]], found: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """What was found, if it belongs to the rows that were asked for, one by one.

    Raises:
        RolloutError: rows are missing, or stand in another order.
    """
    if len(found) != len(rows):
        raise RolloutError(f"{name} answered {len(found)} of {len(rows)} rows")
    for row, one in zip(rows, found, strict=True):
        if one["row"] != row or one["prompt"] != prompt_ids[row]:
            answered = (one["prompt"] or [])[:8]
            raise RolloutError(
                f"{name} answered row {one['row']}, prompt {answered}, where row {row}, prompt {prompt_ids[row][:8]}, "
                "was asked: its responses are in another order"
            )
    return found
