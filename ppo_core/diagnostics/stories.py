"""Stories: several signs that have one cause, what it is, and what to do about it.

Each is a function of what the journal holds, with the same thresholds for every run. A story needs its main sign and
as many of the others as it says, never all of them: runs differ in what shows. The first group is of faults in the
program, under which no other number can be believed; where one is found, the second group is not looked at.
docs/diagnosis.md has them in words, and what they cannot tell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ppo_core.diagnostics import developments, faults
from ppo_core.diagnostics.signs import Reading, Sign


@dataclass(frozen=True)
class Found:
    """A story with its evidence, the main sign first."""

    story: Story
    signs: tuple[Sign, ...]

    @property
    def onset(self) -> int | None:
        """The first iteration from which one of the signs moved."""
        return min((sign.onset for sign in self.signs if sign.onset is not None), default=None)


@dataclass(frozen=True)
class Story:
    """`look` gives the evidence, or nothing; `remedies.changes_for` says what a roll back would change."""

    name: str
    title: str
    severity: Literal["warning", "critical"]
    meaning: str
    remedy: str
    look: Callable[[Reading], list[Sign]]


def look_for_stories(reading: Reading) -> list[Found]:
    """The stories whose signs are there now."""
    found = [Found(story, tuple(signs)) for story in FAULTS if (signs := story.look(reading))]
    return found or [Found(story, tuple(signs)) for story in DEVELOPMENTS if (signs := story.look(reading))]


FAULTS = (
    Story(
        "off_by_one",
        "Logprobs look one token off",
        "critical",
        "Engine and trainer disagree by whole nats on tokens that the engine drew, from the first iteration on, while "
        "the trainer agrees with itself: its logprobs are of other tokens than those that were drawn.",
        "Compare one row alone, unpadded, with a plain pass of the model; look at what shifts logits against tokens. "
        "Nothing that was trained so far is worth keeping.",
        faults.off_by_one,
    ),
    Story(
        "engine_logprobs",
        "Engine logprobs are used as old logprobs",
        "critical",
        "The old logprobs of the ratio are the engine's own, not the trainer's: every ratio carries the difference "
        "between the two programs, and so does every gradient.",
        "Make old logprobs by the trainer's own pass before the first update, with the update's precision and kernel.",
        faults.engine_logprobs,
    ),
    Story(
        "padding_in_averages",
        "Padding counts in averages",
        "critical",
        "Averages over tokens are taken over more than the response tokens, so that losses and metrics change with how "
        "long the longest answer of a batch is.",
        "Look at which mask the averages are taken with; sum over response tokens and divide by their number.",
        faults.padding_in_averages,
    ),
    Story(
        "weights_out_of_sync",
        "The engine does not hold the trained weights",
        "critical",
        "The gap between engine and trainer grows with training: answers come from older weights than the ones that "
        "are trained.",
        "Start again from the checkpoint, which loads the engine anew; look at rollout/policy_version and the engine's "
        "log.",
        faults.weights_out_of_sync,
    ),
    Story(
        "out_of_memory_in_generation",
        "Generation runs out of memory",
        "warning",
        "The rows of a batch no longer fit at once, so they are generated in parts: nothing is wrong, and every "
        "iteration takes longer.",
        "Lower rollout.max_new_tokens, or what else lies on the device; with vLLM lower rollout.vllm.max_rows.",
        faults.out_of_memory,
    ),
)
DEVELOPMENTS = (
    Story(
        "length_hacking",
        "This looks like reward hacking by length",
        "critical",
        "Answers grow and the score with them, while they end less often, drift from the reference or repeat "
        "themselves: the reward pays for length, not for content.",
        "Go back to before the answers grew, with a higher kl.coef and a reward.missing_eos_penalty; take length out "
        "of the score by reward.length_baseline.",
        developments.length_hacking,
    ),
    Story(
        "reward_hacking",
        "This looks like reward hacking by format",
        "critical",
        "The score rises while answers become alike or repeat themselves: the policy has found a form that the reward "
        "likes.",
        "Read answers of high score; go back to before they became alike, with a higher kl.coef; correct the reward.",
        developments.reward_hacking,
    ),
    Story(
        "too_many_epochs",
        "Too many epochs on one batch",
        "critical",
        "By its last epoch the update is far from the policy that made the rollout: its advantages no longer hold.",
        "Lower update.epochs, or set update.target_kl.",
        developments.too_many_epochs,
    ),
    Story(
        "entropy_collapse",
        "Entropy has collapsed",
        "critical",
        "The policy has become certain: answers become alike, and nothing new is tried.",
        "Go back to before the fall with an entropy bonus (update.entropy_coef) or a higher kl.coef.",
        developments.entropy_collapse,
    ),
    Story(
        "kl_runaway",
        "The policy runs away from its reference",
        "critical",
        "KL to the reference grows ever faster, and not since answers became longer: the penalty does not hold it.",
        "Go back to before the growth, with a higher kl.coef or a lower update.learning_rate.",
        developments.kl_runaway,
    ),
    Story(
        "critic_not_learning",
        "The critic does not learn",
        "warning",
        "The critic foresees nothing of the returns: advantages are as noisy as the scores, and the policy learns "
        "slowly or the wrong thing.",
        "Warm the critic up (update.critic_warmup_iterations), raise update.value_learning_rate, widen the value clip.",
        developments.critic_not_learning,
    ),
    Story(
        "generation_cut_off",
        "Answers are cut off",
        "warning",
        "Many more answers than at the beginning end at the length limit, without the score gaining by it: scores are "
        "of half an answer.",
        "Raise rollout.max_new_tokens, or look at what keeps the end-of-text from being drawn.",
        developments.cut_off,
    ),
)
STORIES = {story.name: story for story in (*FAULTS, *DEVELOPMENTS)}
READ_BY_STORIES = frozenset(
    {
        "reward/score_mean", "reward/total_mean", "reward/length_slope", "kl/ref_token", "kl/ref_sequence",
        "kl/ref_token_k3", "kl/ref_sequence_k3", "policy/approx_kl", "policy/clip_fraction", "policy/entropy",
        "policy/approx_kl/epoch_*", "policy/clip_fraction/epoch_*", "policy/first_minibatch_ratio_max_dev",
        "value/explained_variance_return", "value/mean", "value/return_mean", "value/grad_norm", "value/clip_fraction",
        "advantage/std", "response/length_mean", "response/length_p95", "response/eos_rate", "response/distinct_2",
        "response/repeat_3", "response/identical", "rollout/engine_gap_mean", "rollout/engine_gap_max",
        "rollout/rows_at_once", "data/response_tokens", "data/prompts_trained",
    }
)  # fmt: skip
