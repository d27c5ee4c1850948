"""The evidence for what goes wrong in the training itself: the reward, the critic, the policy or the settings.

Each function gives the signs that are there now, the main one first, or nothing. Pure functions of what the journal
holds.
"""

from __future__ import annotations

import math

from ppo_core.diagnostics.bands import KL_BACK, KL_FLOOR
from ppo_core.diagnostics.signs import Reading, Sign, with_others

LONGER = 1.4
EOS_FELL = 0.05
EOS_CUT_OFF = 0.15
POORER_PAIRS = 0.9
MANY_REPEATS = 0.1
MANY_TWINS = 0.15
LESS_ENTROPY = 0.6
ENTROPY_GONE = 0.5
BLIND_FOR = 20  # iterations
BLIND = 0.05  # explained variance
EPOCHS_APART = 2.5
EPOCH_KL = 0.05
EPOCH_CLIPPED = 0.25
RAN_AWAY = 3.0
RAN_FAR = 10.0  # nats a response


def _score_rose(reading: Reading) -> Sign | None:
    name = "reward/score_mean"
    start, now = reading.start(name), reading.now(name)
    if start is None or now is None or now - start.median <= 2 * start.mad:
        return None
    return Sign(name, start.median, now, f"the score rose from {start.median:.3g} to {now:.3g}")


def _kl_grew(reading: Reading, factor: float) -> Sign | None:
    """Against 40 iterations before (or the beginning), counted from a few nats up."""
    name = "kl/ref_sequence"
    now, then, start = reading.now(name), reading.history.before(name, KL_BACK), reading.start(name)
    if then is None and start is not None:
        then = start.median
    if now is None or then is None or now <= factor * max(then, KL_FLOOR):
        return None
    return Sign(name, then, now, f"KL to the reference grew from {then:.3g} to {now:.3g} nats a response")


def _pairs_poorer(reading: Reading) -> Sign | None:
    return reading.fell_by("response/distinct_2", factor=POORER_PAIRS)


def _repeats(reading: Reading) -> Sign | None:
    return reading.rose_by("response/repeat_3", factor=2.0, difference=MANY_REPEATS)


def _twins(reading: Reading) -> Sign | None:
    return reading.rose_by("response/identical", difference=MANY_TWINS)


def _paid_for_length(reading: Reading) -> Sign | None:
    name = "reward/length_slope"
    share, now = reading.share(name, 0.0, 20), reading.now(name)
    if share is None or now is None or share < 0.9:
        return None
    return Sign(name, None, now, f"each further token earns {now:.2g} of score: the reward pays for length")


def _narrows_as_it_grows(reading: Reading) -> bool:
    """Whether distinct pairs fell by a larger factor than the root of what length grew by.

    An answer that only goes on says new things: its pairs stay distinct. One that is longer since a form is repeated in
    it is a matter of that form, and would be one at any length.
    """
    length, longer = reading.start("response/length_mean"), reading.now("response/length_mean")
    pairs, fewer = reading.start("response/distinct_2"), reading.now("response/distinct_2")
    if length is None or longer is None or pairs is None or fewer is None:
        return False
    return bool(pairs.median * math.sqrt(length.median) > fewer * math.sqrt(longer))


def length_hacking(reading: Reading) -> list[Sign]:
    score = _score_rose(reading)
    if score is None or _narrows_as_it_grows(reading):
        return []
    signs = with_others(
        reading.rose_by("response/length_mean", factor=LONGER),
        [
            reading.fell_by("response/eos_rate", difference=EOS_FELL),
            _kl_grew(reading, 2.0),
            _paid_for_length(reading),
            _pairs_poorer(reading),
            _repeats(reading),
        ],
        least=2,
    )
    return [*signs, score] if signs else []


def reward_hacking(reading: Reading) -> list[Sign]:
    score = _score_rose(reading)
    main = reading.fell_by("response/distinct_2", factor=0.75) or _twins(reading) or _repeats(reading)
    others = [
        _twins(reading),
        _repeats(reading),
        reading.fell_by("policy/entropy", factor=LESS_ENTROPY),
        _kl_grew(reading, 2.0),
    ]
    others = [sign for sign in others if sign is not None and (main is None or sign.metric != main.metric)]
    signs = with_others(main, [*others], least=1)
    return [*signs, score] if signs and score else []


def critic_not_learning(reading: Reading) -> list[Sign]:
    name = "value/explained_variance_return"
    values = reading.history.last(name, BLIND_FOR)
    if reading.learning_for < 2 * BLIND_FOR or len(values) < BLIND_FOR or reading.now(name) is None:
        return []
    if sum(value < BLIND for value in values) < 0.8 * BLIND_FOR:
        return []
    now = reading.now(name) or 0.0
    text = f"the critic explains {now:.2g} of the returns' spread, and no more for {BLIND_FOR} iterations"
    main = Sign(name, None, now, text, reading.history.series(name)[-BLIND_FOR][0])
    others: list[Sign | None] = []
    mean, target, spread = (reading.now(each) for each in ("value/mean", "value/return_mean", "advantage/std"))
    if mean is not None and target is not None and spread and abs(mean - target) > spread / 3:
        text = f"its mean value is {mean:.3g} while returns average {target:.3g}"
        others.append(Sign("value/mean", target, mean, text))
    norm = reading.now("value/grad_norm")
    if norm is not None and norm < 1e-6:
        others.append(Sign("value/grad_norm", None, norm, "no gradient reaches it"))
    clipped = reading.now("value/clip_fraction")
    if clipped is not None and clipped > 0.5:
        text = f"the value clip holds {clipped:.0%} of its tokens back"
        others.append(Sign("value/clip_fraction", None, clipped, text))
    if all(value < 0 for value in values):
        others.append(Sign(name, 0.0, now, "it is worse than saying the same everywhere"))
    return with_others(main, others, least=1)


def entropy_collapse(reading: Reading) -> list[Sign]:
    return with_others(
        reading.fell_by("policy/entropy", factor=ENTROPY_GONE),
        [_pairs_poorer(reading), _twins(reading), _repeats(reading)],
        least=0,
    )


def kl_runaway(reading: Reading) -> list[Sign]:
    main = _kl_grew(reading, RAN_AWAY)
    if main is None or main.now is None or main.then is None or main.now < RAN_FAR:
        return []
    half = reading.history.before("kl/ref_sequence", KL_BACK // 2)
    if half is not None and main.then is not None and main.now - half < 0.75 * (half - main.then):
        return []  # It slows down by itself.
    approx, clipped = reading.now("policy/approx_kl"), reading.now("policy/clip_fraction")
    token, before = reading.now("kl/ref_token"), reading.history.before("kl/ref_token", KL_BACK)
    total = reading.fell_by("reward/total_mean")
    return with_others(
        Sign(main.metric, main.then, main.now, main.text, max(1, reading.iteration - KL_BACK)),
        [
            Sign("policy/approx_kl", None, approx, f"each update moves it by {approx:.2g} nats a token")
            if approx is not None and approx > 0.02
            else None,
            Sign("policy/clip_fraction", None, clipped, f"{clipped:.0%} of tokens are clipped")
            if clipped is not None and clipped > EPOCH_CLIPPED
            else None,
            Sign(
                "kl/ref_token",
                before,
                token,
                f"token by token it grew from {before:.2g} to {token:.2g}, so not by length",
            )
            if token is not None and before is not None and token > 2 * max(before, 0.0)
            else None,
            total,
        ],
        least=1,
    )


def too_many_epochs(reading: Reading) -> list[Sign]:
    epochs = reading.spec.update.epochs
    if epochs < 2:
        return []
    first, last = reading.now("policy/approx_kl/epoch_1"), reading.now(f"policy/approx_kl/epoch_{epochs}")
    clipped = reading.now(f"policy/clip_fraction/epoch_{epochs}")
    if first is None or last is None or clipped is None:
        return []
    if last < EPOCH_KL or last < EPOCHS_APART * first or clipped < EPOCH_CLIPPED:
        return []
    name = f"policy/approx_kl/epoch_{epochs}"
    text = f"the update has moved {last:.2g} nats a token by epoch {epochs}, {first:.2g} in the first"
    return [
        Sign(name, first, last, text, _first_above(reading, name, EPOCH_KL)),
        Sign(
            f"policy/clip_fraction/epoch_{epochs}", None, clipped, f"{clipped:.0%} of its tokens lie outside the clip"
        ),
    ]


def _first_above(reading: Reading, name: str, bound: float) -> int:
    """Where the last unbroken run of smoothed values above a bound began."""
    since = reading.iteration
    for at, value in reversed(reading.history.smoothed(name)):
        if value <= bound:
            break
        since = at
    return since


def cut_off(reading: Reading) -> list[Sign]:
    fell = reading.fell_by("response/eos_rate", difference=EOS_CUT_OFF)
    longer = reading.rose_by("response/length_mean", factor=LONGER)
    if fell is None or (longer is not None and _score_rose(reading) is not None):
        return []
    others: list[Sign | None] = []
    p95 = reading.now("response/length_p95")
    if p95 is not None and p95 >= reading.spec.rollout.max_new_tokens:
        others.append(Sign("response/length_p95", None, p95, f"the longest end at the limit of {p95:g} tokens"))
    return [fell, *[sign for sign in others if sign]]
