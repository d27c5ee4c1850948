"""Every error that `ppo_core` raises on purpose: a short family, each with a stable `code` and an exit code.

The exit code is what the trainer process leaves with (see `ppo_core.rundir.ExitCode`); the platform stores `code`,
the message and `hint` beside the run and shows them as they are.
"""

from __future__ import annotations


class PPOCoreError(Exception):
    """Something went wrong in the training core; `code` says what, the message carries the numbers."""

    code = "core_error"
    exit_code = 70
    end_reason = "error"
    hint = "Look at the end of the trainer's log."

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        if hint is not None:
            self.hint = hint


class ShapeError(PPOCoreError, ValueError):
    """Tensors that belong together differ in shape, or have the wrong number of axes."""

    code = "shape"
    hint = "Every per-token tensor lives on the shifted grid [B, L - 1]."


class AlignmentError(PPOCoreError, ValueError):
    """A row's response mask does not hold as many tokens as were generated for it."""

    code = "alignment"
    hint = "Compare response_start and response_length with the attention mask of the row named."


class SpecError(PPOCoreError, ValueError):
    """A run spec is malformed, or asks for what cannot be. Raised with every fault found, not only the first."""

    code = "spec"
    exit_code = 64
    hint = "Correct the fields named and submit again."


class DataError(PPOCoreError, ValueError):
    """Prompts or models named by the spec are missing, unreadable or unfit; the message names file and row."""

    code = "data"
    exit_code = 65
    hint = "Correct the file or the row named."


class RewardError(PPOCoreError):
    """Too many scores could not be used: they were missing, non-finite or of the wrong number."""

    code = "reward"
    exit_code = 65
    hint = "Run the reward source on the prompts of the failed iteration by hand."


class RatioError(PPOCoreError):
    """Before any update the policy does not repeat its own logprobs, so every later ratio would be wrong."""

    code = "first_minibatch_ratio"
    hint = (
        "The passes that make old and new logprobs differ: compare dropout, attention kernel, position ids, "
        "precision and padding of the two."
    )


class NonFiniteError(PPOCoreError):
    """Loss or gradient was NaN or infinite more often in a row than the spec allows."""

    code = "non_finite"
    hint = "Lower update.learning_rate, or roll back to a checkpoint before the first skipped step."


class RolloutError(PPOCoreError):
    """The rollout engine returned what cannot be right, or missed its deadline."""

    code = "rollout"


class EngineLostError(RolloutError):
    """The rollout engine's process ended while it was needed; the message says of what, with the end of its log."""

    code = "engine_lost"
    hint = (
        "Killed by SIGKILL usually means that the machine ran out of memory: lower rollout.vllm.kv_cache_gib or "
        "rollout.vllm.max_rows. Start again from the last checkpoint."
    )


class EngineTimeoutError(RolloutError):
    """The rollout engine's process lives but said nothing for too long, and was killed."""

    code = "engine_timeout"
    hint = "Look at the engine's log; raise rollout.vllm.timeout_s if it was only slow."


class WeightSyncError(RolloutError):
    """The rollout engine does not hold the weights that the trainer sent; the message has both digests."""

    code = "weight_sync"
    hint = (
        "Nothing was trained on what it generated since: resume from the last checkpoint. A server by address serves "
        "one trainer at a time."
    )


class RankLostError(PPOCoreError):
    """Another rank of the run is gone, or did not answer in time. The rank that notices leaves without a word.

    What became of the other one is for whoever started them to say: they see how it ended.
    """

    code = "rank_lost"
    hint = "Look at the end of every rank's log."


class CheckpointError(PPOCoreError):
    """A checkpoint cannot be written, or is damaged: the message names the file and what is wrong with it."""

    code = "checkpoint"
    hint = "Verify the checkpoints of this run and take the newest good one."


class DiskFullError(CheckpointError):
    """There was no space left for a file of the run. The run pauses on its last good checkpoint; nothing half stays."""

    code = "disk_full"
    exit_code = 10
    end_reason = "disk_full"
    hint = (
        "Free space on this disk, or lower checkpoints.keep_last, then resume the run: it goes on from its last good "
        "checkpoint."
    )


class RunDirectoryError(PPOCoreError):
    """The run directory breaks its contract: a missing spec, a journal with a gap, a folder that is in use."""

    code = "run_directory"
