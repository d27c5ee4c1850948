"""The engine that is always there: batched decoding with a key-value cache, on the trainer's own modules.

It shares the policy's memory, so a sync moves nothing; it is verified all the same. It fills in nothing from a model
folder's generation defaults.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ppo_core.alignment import gathered_logprobs
from ppo_core.errors import DataError, RolloutError, WeightSyncError
from ppo_core.models.policy import PolicyModel
from ppo_core.models.trunk import position_ids
from ppo_core.rollout.engine import Response, SyncReport
from ppo_core.rollout.limits import SamplingLimits
from ppo_core.rollout.sampling import sample_tokens, uniform_draws
from ppo_core.rollout.weights import PolicyWeights, Probe, weights_digest
from ppo_core.spec.groups import RolloutConfig

LOG = logging.getLogger(__name__)

# Finished rows leave once they are this share of the batch: earlier, copying the cache costs more than they do.
DROP_SHARE = 0.125
# Nats, by two routes, cached steps and one pass; wrong positions or other weights are off by far more. The digest sees
# every bit, so the wide one of bfloat16, which keeps 8 bits of a logit, hides no stale weight.
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}


def stop_ids_of(policy: PolicyModel, tokenizer: Any, config: RolloutConfig) -> list[int]:
    """Every id that ends a response: the model's own, the tokenizer's, and those that the spec adds."""
    found = set(config.stop_ids)
    for own in (policy.model.config.eos_token_id, tokenizer.eos_token_id):
        if isinstance(own, int):
            found.add(own)
        elif own is not None:
            found.update(own)
    return sorted(found)


class TransformersEngine:
    """Samples from the policy it was given, in this process.

    Raises:
        DataError: nothing could end a response: neither model nor tokenizer names an end-of-text id, nor does the spec.
    """

    def __init__(self, policy: PolicyModel, tokenizer: Any, config: RolloutConfig, *, version: int = 0) -> None:
        self._policy = policy
        self._tokenizer = tokenizer
        self._config = config
        self._version = version
        self._max_rows: int | None = None
        self._stop_ids = stop_ids_of(policy, tokenizer, config)
        if not self._stop_ids and not config.stop_strings:
            raise DataError(
                "neither the model nor its tokenizer has an end-of-text id, so no response could ever end",
                hint="Give rollout.stop_ids or rollout.stop_strings.",
            )
        # A stop string of n characters has at most 4 n bytes, and a token has at least one.
        self._tail = max((4 * len(text) + 4 for text in config.stop_strings), default=0)

    @property
    def version(self) -> int:
        return self._version

    @property
    def rows_at_once(self) -> int | None:
        return self._max_rows

    def generate(
        self, prompt_ids: list[list[int]], *, seeds: list[int], check: Callable[[], None] | None = None
    ) -> list[Response]:
        """See `RolloutEngine`. Out of memory: the rows are generated in halves, quarters and so on from then on."""
        if len(prompt_ids) != len(seeds):
            raise RolloutError(f"{len(prompt_ids)} prompts but {len(seeds)} seeds: every row needs its own")
        empty = [row for row, ids in enumerate(prompt_ids) if not ids]
        if empty:
            raise RolloutError(f"prompt {empty[0]} has no token: nothing predicts the first token of its response")
        responses: list[Response] = []
        while len(responses) < len(prompt_ids):
            rows = slice(len(responses), len(responses) + (self._max_rows or len(prompt_ids)))
            try:
                responses += self._generate(prompt_ids[rows], seeds[rows], check)
            except torch.OutOfMemoryError:
                num_rows = len(prompt_ids[rows])
                if num_rows == 1:
                    raise
                self._max_rows = num_rows // 2
                LOG.warning("out of memory with %d rows: generating %d at a time", num_rows, self._max_rows)
        return responses

    def sync_weights(self, weights: PolicyWeights, probe: Probe, version: int) -> SyncReport:
        if weights.policy is self._policy:  # One memory, and one digest tells of both.
            sent = held = weights_digest(weights)
        else:
            sent = weights_digest(self._taken(weights))
            held = weights_digest(PolicyWeights(self._policy))
        if held != sent:
            raise WeightSyncError(f"version {version}: sent weights of digest {sent}, the engine holds {held}")
        gap = probe.gap(self._probe_logprobs(probe))
        allowed = PROBE_TOLERANCE[self._policy.model.dtype]
        if not gap <= allowed:
            raise WeightSyncError(
                f"version {version}, digest {held}: the engine's logprobs of the probe differ from the trainer's by "
                f"{gap:.3g} nats, allowed are {allowed}"
            )
        self._version = version
        return SyncReport(version, held, gap)

    def rest(self) -> None:
        """It holds nothing of its own."""

    def close(self) -> None:
        """Nothing runs beside the trainer."""

    @torch.inference_mode()
    def _generate(
        self, prompt_ids: list[list[int]], seeds: list[int], check: Callable[[], None] | None
    ) -> list[Response]:
        config = self._config
        device = self._policy.device
        decoding = _Decoding(self._policy, prompt_ids, config.max_new_tokens)
        draws = uniform_draws(seeds, config.max_new_tokens).to(device)
        stop_ids = torch.tensor(self._stop_ids, dtype=torch.long, device=device)
        num_rows = len(prompt_ids)
        limits = SamplingLimits(config, self._stop_ids, num_rows)
        ids = torch.zeros(num_rows, config.max_new_tokens, dtype=torch.long, device=device)
        logprobs = torch.zeros(num_rows, config.max_new_tokens, device=device)
        lengths = torch.full((num_rows,), config.max_new_tokens, device=device)
        rows = torch.arange(num_rows, device=device)  # of those still in the batch
        unfinished = torch.ones(num_rows, dtype=torch.bool, device=device)
        with _evaluation(self._policy.model):
            logits = decoding.first_logits()
            for step in range(config.max_new_tokens):
                if check is not None:
                    check()
                logits = limits.limited(logits, rows, step)
                tokens, logprobs[rows, step] = sample_tokens(logits, config.temperature, draws[rows, step])
                ids[rows, step] = tokens
                ended = torch.isin(tokens, stop_ids)
                if config.stop_strings and step >= config.min_new_tokens:
                    ended |= self._ends_by_string(ids[rows, : step + 1], unfinished & ~ended)
                ended &= unfinished
                if bool(ended.any()):
                    lengths[rows[ended]] = step + 1
                    unfinished &= ~ended
                    num_left = int(unfinished.sum())
                    if num_left == 0:
                        break
                    if num_left <= (1 - DROP_SHARE) * len(rows):
                        rows, tokens = rows[unfinished], tokens[unfinished]
                        decoding.keep(unfinished)
                        unfinished = unfinished[unfinished]
                if step + 1 < config.max_new_tokens:
                    logits = decoding.next_logits(tokens)
        if not bool(logprobs.isfinite().all()):
            bad = int((~logprobs.isfinite()).any(dim=1).nonzero()[0])
            raise RolloutError(
                f"row {bad}: the policy's logits are not finite, so nothing can be sampled from them",
                hint="Go back to a checkpoint before the weights became non-finite; lower update.learning_rate.",
            )
        cut_off = torch.zeros(num_rows, dtype=torch.bool, device=device)
        cut_off[rows[unfinished]] = True
        return [
            Response(
                row_ids[:length], "length" if cut else "stop", row_logprobs[:length], limits.token_sets(row, length)
            )
            for row, (row_ids, row_logprobs, length, cut) in enumerate(
                zip(ids.tolist(), logprobs.tolist(), lengths.tolist(), cut_off.tolist(), strict=True)
            )
        ]

    def _ends_by_string(self, ids: Tensor, asked: Tensor) -> Tensor:
        """[b] bool: rows, of those asked, in whose text a stop string has just appeared."""
        found = torch.zeros_like(asked)
        tails = ids[:, -self._tail :].tolist()
        for row in asked.nonzero().flatten().tolist():
            text = self._tokenizer.decode(tails[row], skip_special_tokens=True)
            found[row] = any(stop in text for stop in self._config.stop_strings)
        return found

    @torch.no_grad()
    def _taken(self, weights: PolicyWeights) -> Iterator[tuple[str, Tensor]]:
        """The weights as they come, each copied into the engine's own model."""
        own = dict(self._policy.model.named_parameters())
        for name, tensor in weights:
            if name in own and own[name].shape == tensor.shape:
                own[name].copy_(tensor)
            yield name, tensor

    @torch.inference_mode()
    def _probe_logprobs(self, probe: Probe) -> Tensor:
        """Its own logprobs of the probe's forced tokens, by its own route: left padding, a prefill, cached steps."""
        prompts = [list(row[: -probe.num_forced]) for row in probe.rows]
        forced = torch.tensor([row[-probe.num_forced :] for row in probe.rows], device=self._policy.device)
        with _evaluation(self._policy.model):
            decoding = _Decoding(self._policy, prompts, probe.num_forced)
            logits = [decoding.first_logits()]
            logits += [decoding.next_logits(forced[:, step]) for step in range(probe.num_forced - 1)]
        return gathered_logprobs(torch.stack(logits, dim=1), forced)


class _Decoding:
    """The batch under way: left-padded prompts, their cache, and each row's next position."""

    def __init__(self, policy: PolicyModel, prompt_ids: list[list[int]], max_new_tokens: int) -> None:
        self._model = policy.model
        self._head = policy.logits_head
        device = policy.device
        width = max(len(ids) for ids in prompt_ids)
        self._prompts = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompt_ids], device=device)
        lengths = torch.tensor([len(ids) for ids in prompt_ids], device=device)
        columns = torch.arange(width + max_new_tokens, device=device)
        self._mask = (columns >= width - lengths.unsqueeze(1)).long()
        self._next_position = lengths.unsqueeze(1)
        self._width = width
        # Measured against one allocated ahead and written in place: growing is no slower, and knows every family.
        self._cache = DynamicCache(config=policy.model.config)

    def first_logits(self) -> Tensor:
        """[b, V]: the prefill's, about each row's first new token."""
        mask = self._mask[:, : self._width]
        return self._forward(self._prompts, mask, position_ids(mask))

    def next_logits(self, tokens: Tensor) -> Tensor:
        """[b, V]: after each row was given its newest token [b]."""
        self._width += 1
        logits = self._forward(tokens.unsqueeze(1), self._mask[:, : self._width], self._next_position)
        self._next_position = self._next_position + 1
        return logits

    def keep(self, which: Tensor) -> None:
        """Drop the other rows from the batch and the cache; `which` is [b] bool."""
        self._mask = self._mask[which]
        self._next_position = self._next_position[which]
        self._cache.batch_select_indices(which.nonzero().flatten())

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        hidden: Tensor = self._model.base_model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=self._cache, use_cache=True
        ).last_hidden_state
        return self._head(hidden[:, -1])


@contextmanager
def _evaluation(model: Any) -> Iterator[None]:
    """Generation runs in evaluation mode, whatever the trainer has set."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        if was_training:
            model.train()
