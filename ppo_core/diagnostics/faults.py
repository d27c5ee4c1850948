"""The evidence for faults of the program: where one is there, no other number of the run can be believed.

Each function gives the signs that are there now, the main one first, or nothing. Pure functions of what the journal
holds.
"""

from __future__ import annotations

from itertools import pairwise

from ppo_core.diagnostics.history import KEPT, onset
from ppo_core.diagnostics.signs import Reading, Sign

# Nats a token. Two passes over the same weights differ by some thousandths in bfloat16; a neighbour's logprob by whole
# nats.
GAP_OF_ANOTHER_TOKEN = 0.3
GAP_OF_OTHER_WEIGHTS = 0.003
GAP_GROWTH = 5.0
# Averages that leave padding out agree to rounding with sums and counts.
SAME_AVERAGE = 0.02


def off_by_one(reading: Reading) -> list[Sign]:
    name = "rollout/engine_gap_mean"
    first, now = reading.history.last(name, KEPT)[:3], reading.now(name)
    if now is None or now < GAP_OF_ANOTHER_TOKEN or min(first) < GAP_OF_ANOTHER_TOKEN:
        return []
    if reading.iteration >= reading.history.series(name)[0][0] + KEPT:
        return []
    text = f"engine and trainer have differed by {now:.2g} nats a token since the first iteration"
    signs = [Sign(name, None, now, text, reading.history.series(name)[0][0])]
    ratio = reading.now("policy/first_minibatch_ratio_max_dev")
    if ratio is not None and ratio < 0.01:
        text = "the ratio check passes, so the trainer agrees with itself: both of its passes are wrong alike"
        signs.append(Sign("policy/first_minibatch_ratio_max_dev", None, ratio, text))
    return signs


def engine_logprobs(reading: Reading) -> list[Sign]:
    """Two routes through one model never agree to the last bit on every token of many iterations."""
    gaps = reading.history.last("rollout/engine_gap_max", 10)
    if len(gaps) < 10 or any(gaps):
        return []
    text = (
        "engine logprobs and old logprobs have been equal to the last bit for ten iterations: they are the same numbers"
    )
    signs = [Sign("rollout/engine_gap_max", None, 0.0, text, reading.history.series("rollout/engine_gap_max")[0][0])]
    ratio = reading.now("policy/first_minibatch_ratio_max_dev")
    if ratio is not None and ratio > 0:
        text = f"before the first optimizer step the ratio is off by {ratio:.2g}: the difference shows there instead"
        signs.append(Sign("policy/first_minibatch_ratio_max_dev", None, ratio, text))
    return signs if len(signs) > 1 else []


def padding_in_averages(reading: Reading) -> list[Sign]:
    """A sum over responses is the mean a token times the tokens, whichever way either is taken."""
    name = "kl/ref_token_k3"
    per_token, per_row = reading.history.last(name, 5), reading.history.last("kl/ref_sequence_k3", 5)
    tokens, trained = reading.history.last("data/response_tokens", 5), reading.history.last("data/prompts_trained", 6)
    rows = [b - a for a, b in pairwise(trained)]
    if not len(per_token) == len(per_row) == len(tokens) == len(rows) == 5:
        return []
    pairs = [
        (token * count, row * num)
        for token, row, count, num in zip(per_token, per_row, tokens, rows, strict=True)
        if min(token, row, num) > 1e-9
    ]
    if len(pairs) < 5 or any(abs(a / b - 1) < SAME_AVERAGE for a, b in pairs):
        return []
    share = pairs[-1][0] / pairs[-1][1]
    text = (
        f"KL a token times the tokens is {share:.0%} of KL a response times the responses, which are the same sum: "
        "averages over tokens count others than the response tokens"
    )
    return [Sign(name, None, per_token[-1], text, reading.history.series(name)[0][0])]


def weights_out_of_sync(reading: Reading) -> list[Sign]:
    """Against the first iterations, in which engine and trainer still hold the same weights whatever is wrong."""
    name = "rollout/engine_gap_mean"
    first, now, kl = reading.baseline.first(name), reading.now(name), reading.now("kl/ref_token")
    if first is None or now is None or now < max(GAP_GROWTH * first, first + GAP_OF_OTHER_WEIGHTS):
        return []
    since = onset(reading.history.smoothed(name), first, now)
    text = f"the gap between engine and trainer grew from {first:.2g} to {now:.2g} nats a token, from {since} on"
    signs = [Sign(name, first, now, text, since)]
    if kl is not None and kl < 0:
        text = f"KL to the reference is {kl:.2g} nats a token: answers are not drawn from the policy that is measured"
        signs.append(Sign("kl/ref_token", None, kl, text))
    return signs


def out_of_memory(reading: Reading) -> list[Sign]:
    name = "rollout/rows_at_once"
    pairs = reading.history.series(name)
    if not pairs or pairs[-1][1] >= reading.spec.rollout.batch_size:
        return []
    since = next((at for at, value in pairs if value == pairs[-1][1]), pairs[-1][0])
    text = f"generation ran out of memory: {pairs[-1][1]:.0f} of {reading.spec.rollout.batch_size} rows go at once now"
    return [Sign(name, float(reading.spec.rollout.batch_size), pairs[-1][1], text, since)]
