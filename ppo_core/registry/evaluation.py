"""Metrics of held-out prompts: the reward's own view, and the judge's."""

from functools import partial

from ppo_core.registry.definition import Metric

_OVERFIT = "Behind reward/score_mean by more and more: what is learned does not carry over to new prompts."
_HACKED = "Falling or flat while the training score rises: the reward is being hacked."
_BACK = (
    "Read the gate's samples; go back to the checkpoint before the rise; correct the reward source or raise kl.coef."
)

_held_out = partial(
    Metric, panel="evaluation", weighting="each held-out response counts once", when="evaluation", direction="higher"
)
_win_rate = partial(
    Metric,
    panel="evaluation",
    unit="share",
    weighting="each held-out prompt counts once, both orders together",
    legal=(0.0, 1.0),
    direction="higher",
    when="gate",
)

METRICS = (
    _held_out(
        name="heldout/score_mean",
        title="Held-out score",
        formula="Mean raw score of the answers to the held-out prompts.",
        unit="score",
        meaning=_OVERFIT,
        remedy="Use more or other training prompts; look at judge/score_mean.",
    ),
    _held_out(
        name="heldout/score_std",
        title="Held-out score deviation",
        formula="Standard deviation (biased) of the raw scores of the answers to the held-out prompts.",
        unit="score",
        legal=(0.0, None),
        meaning="At iteration 0 it is the yardstick for the rise of heldout/score_mean.",
        remedy="Near zero: check that the reward source tells responses apart.",
        direction="none",
    ),
    _held_out(
        name="heldout/length_mean",
        title="Held-out response length",
        formula="Mean number of generated tokens of the answers to the held-out prompts, end-of-text included.",
        unit="tokens",
        legal=(0.0, None),
        meaning="Moves with the score: length, not content, may be what is rewarded.",
        remedy="Set a reward.missing_eos_penalty, raise kl.coef, or correct the reward source for length.",
        direction="none",
    ),
    _held_out(
        name="heldout/eos_rate",
        title="Held-out EOS rate",
        formula="Share of the answers to the held-out prompts that ended by themselves.",
        unit="share",
        legal=(0.0, 1.0),
        meaning="The policy forgets how to end.",
        remedy="Set a reward.missing_eos_penalty, or raise rollout.max_new_tokens.",
    ),
    _held_out(
        name="heldout/distinct_2",
        title="Held-out distinct token pairs",
        formula="Distinct pairs of neighbouring tokens / all such pairs, over the answers to the held-out prompts.",
        unit="share",
        weighting="each pair of neighbouring response tokens counts once",
        legal=(0.0, 1.0),
        meaning="Answers repeat themselves or one another.",
        remedy="Raise kl.coef or update.entropy_coef, or go back to a checkpoint before the change.",
    ),
    _held_out(
        name="judge/score_mean",
        title="Judge's score",
        formula="Mean score by the judge of the answers to the held-out prompts.",
        unit="judge's score",
        meaning=_HACKED,
        remedy=_BACK,
    ),
    _win_rate(
        name="judge/win_rate",
        title="Win rate against the last gate",
        formula="Share of held-out prompts whose answer the judge prefers to the last gate's; a tie counts half.",
        meaning=_HACKED,
        remedy=_BACK,
    ),
    _win_rate(
        name="judge/win_rate_low",
        title="Win rate, lower end",
        formula="Lower end of the 95 % interval of judge/win_rate.",
        meaning="Above one half: the policy has become better beyond chance.",
        remedy="Wide interval: raise gate.prompts.",
    ),
    _win_rate(
        name="judge/win_rate_high",
        title="Win rate, upper end",
        formula="Upper end of the 95 % interval of judge/win_rate.",
        meaning="Below one half: the policy has become worse; if the training score has risen, the gate trips.",
        remedy=_BACK,
    ),
    _win_rate(
        name="judge/win_rate_vs_start",
        title="Win rate against the start",
        formula="Share of held-out prompts whose answer the judge prefers to the first policy's; a tie counts half.",
        meaning="At or below one half: all the training so far has gained nothing that the judge sees.",
        remedy=_BACK,
    ),
    _win_rate(
        name="judge/win_rate_vs_start_low",
        title="Win rate against the start, lower end",
        formula="Lower end of the 95 % interval of judge/win_rate_vs_start.",
        meaning="Above one half: the judge sees a gain over the first policy beyond chance.",
        remedy="Wide interval: raise gate.prompts.",
    ),
    _win_rate(
        name="judge/win_rate_vs_start_high",
        title="Win rate against the start, upper end",
        formula="Upper end of the 95 % interval of judge/win_rate_vs_start.",
        meaning="Below one half: the judge likes the first policy's answers better, beyond chance.",
        remedy=_BACK,
    ),
)
