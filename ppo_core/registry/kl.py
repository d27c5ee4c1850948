"""Metrics of the distance between the policy and its reference."""

from ppo_core.registry.definition import Band, Metric

_GROWTH = Band(
    "Less than twice its value of 40 iterations before; red beyond three times.",
    high=2.0,
    red_high=3.0,
    relative_to="40 iterations before",
    measure="factor",
)
_RUNAWAY = "Growing ever faster: the policy runs away from its reference, most often to please the scorer."
_HOLD = "Raise kl.coef, lower update.learning_rate, or go back to a checkpoint before the growth began."

METRICS = (
    Metric(
        name="kl/ref_token",
        title="KL to reference, a token",
        panel="kl",
        formula="Mean of old logprob minus reference logprob (k1) of the sampled tokens.",
        unit="nats/token",
        weighting="each response token counts once",
        band=Band("Not below 0, but for chance near 0; red below −0.01: no KL is negative.", low=0.0, red_low=-0.01),
        meaning=_RUNAWAY + " Clearly negative: the two passes do not agree, or sampling is not the policy's own.",
        remedy=_HOLD,
        direction="lower",
    ),
    Metric(
        name="kl/ref_sequence",
        title="KL to reference, a response",
        panel="kl",
        formula="Mean over responses of the sum of old logprob minus reference logprob (k1) of their tokens.",
        unit="nats/response",
        weighting="each response counts once",
        band=_GROWTH,
        meaning=_RUNAWAY,
        remedy=_HOLD,
        direction="lower",
    ),
    Metric(
        name="kl/ref_token_k3",
        title="KL to reference, a token (k3)",
        panel="kl",
        formula="Mean of exp(-d) - 1 + d, with d = old logprob minus reference logprob (k3).",
        unit="nats/token",
        weighting="each response token counts once",
        legal=(0.0, None),
        meaning="Never negative and less noisy than k1; far above it: a few tokens that the reference finds likelier.",
        remedy=_HOLD,
        direction="lower",
    ),
    Metric(
        name="kl/ref_sequence_k3",
        title="KL to reference, a response (k3)",
        panel="kl",
        formula="Mean over responses of the sum of k3 over their tokens.",
        unit="nats/response",
        weighting="each response counts once",
        legal=(0.0, None),
        band=_GROWTH,
        meaning=_RUNAWAY,
        remedy=_HOLD,
        direction="lower",
    ),
    Metric(
        name="kl/coef",
        title="KL coefficient",
        panel="kl",
        formula="Weight of the per-token KL in the rewards of this iteration.",
        unit="score/nat",
        weighting="one value an iteration",
        legal=(0.0, None),
        meaning="Zero: nothing holds the policy near its reference.",
        remedy="Set kl.coef so that the penalty of a response stays below the spread of its score.",
    ),
    Metric(
        name="kl/target_error",
        title="KL away from its target",
        panel="kl",
        formula="(kl/ref_sequence minus kl.target) / kl.target; null with a fixed coefficient.",
        unit="share of the target",
        weighting="each response counts once",
        band=Band(
            "Below 1, less than twice the target; red beyond 2.",
            high=1.0,
            red_high=2.0,
        ),
        meaning="Above 0.2 the controller raises kl.coef at its full pace; staying there, it cannot keep up. At -1 the "
        "policy has not moved yet.",
        remedy="Lower kl.horizon so that it acts faster, start from a higher kl.coef, or lower update.learning_rate.",
    ),
)
