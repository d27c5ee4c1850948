"""`RunSpec`: everything that decides a run, and the checks that span its groups."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from ppo_core.spec.engines import TrainingConfig
from ppo_core.spec.groups import (
    CheckpointsConfig,
    DataConfig,
    EvaluationConfig,
    GAEConfig,
    GateConfig,
    KLConfig,
    PolicyConfig,
    ResourcesConfig,
    RolloutConfig,
    SamplesConfig,
    UpdateConfig,
)
from ppo_core.spec.scorers import MIN_ROWS_FOR_SLOPE, RewardConfig
from ppo_core.spec.setting import Group, Misfits, setting
from ppo_core.spec.watching import AlertsConfig, PreflightConfig


class RunSpec(Group):
    """One training run, whole: with the seed and the code's version it decides every number that comes out."""

    name: str = setting(
        ...,
        "never",
        "A label for people; it is never used as a path. `ppo edit` and the API rename a run at any time.",
        min_length=1,
        max_length=128,
        pattern=r"^[^\x00-\x1f\x7f]+$",
    )
    seed: int = setting(1, "fork", "Decides prompts' order, sampling and every shuffle.", ge=0, le=2**53 - 1)
    iterations: int = setting(100, "rollback", "PPO iterations: one rollout and its update each.", ge=1, le=10_000_000)
    policy: PolicyConfig = setting(..., "fork", "The model that is trained.")
    data: DataConfig = setting(..., "fork", "Prompts.")
    rollout: RolloutConfig = setting(RolloutConfig(), "rollback", "Sampling.")
    reward: RewardConfig = setting(..., "rollback", "Scores.")
    kl: KLConfig = setting(KLConfig(), "rollback", "KL penalty.")
    gae: GAEConfig = setting(GAEConfig(), "rollback", "Advantages.")
    update: UpdateConfig = setting(UpdateConfig(), "rollback", "Gradient steps.")
    training: TrainingConfig = setting(TrainingConfig(), "rollback", "Processes.")
    gate: GateConfig = setting(GateConfig(), "rollback", "Judge gate.")
    evaluation: EvaluationConfig = setting(EvaluationConfig(), "rollback", "Held-out scores.")
    samples: SamplesConfig = setting(SamplesConfig(), "rollback", "Kept responses.")
    checkpoints: CheckpointsConfig = setting(CheckpointsConfig(), "rollback", "Checkpoints.")
    alerts: AlertsConfig = setting(AlertsConfig(), "rollback", "Alerts.")
    preflight: PreflightConfig = setting(PreflightConfig(), "rollback", "Checks before the first iteration.")
    resources: ResourcesConfig = setting(ResourcesConfig(), "rollback", "GPUs, priority and time.")

    @model_validator(mode="after")
    def _groups_fit_together(self) -> Self:
        misfits = []
        if self.update.minibatches > self.rollout.batch_size:
            message = (
                f"update.minibatches is {self.update.minibatches} but rollout.batch_size is only "
                f"{self.rollout.batch_size}: every minibatch needs a row; lower update.minibatches"
            )
            misfits.append(("/update/minibatches", message))
        if self.kl.horizon is not None and self.kl.horizon < self.rollout.batch_size:
            message = (
                f"kl.horizon is {self.kl.horizon} but rollout.batch_size is {self.rollout.batch_size}: one iteration "
                "would move kl.coef by more than 20 %; raise kl.horizon, 10000 is usual"
            )
            misfits.append(("/kl/horizon", message))
        if self.reward.length_baseline == "linear" and self.rollout.batch_size < MIN_ROWS_FOR_SLOPE:
            message = (
                f"reward.length_baseline is linear but rollout.batch_size is {self.rollout.batch_size}: a slope needs "
                f"at least {MIN_ROWS_FOR_SLOPE} responses; raise rollout.batch_size or set the baseline to none"
            )
            misfits.append(("/reward/length_baseline", message))
        misfits += self._misfits_of_processes()
        judge = self.gate.judge
        if judge is not None and self.data.held_out is None:
            message = "gate.judge needs data.held_out: the judge compares answers to held-out prompts; name a file"
            misfits.append(("/data/held_out", message))
        for index, source in enumerate(self.reward.sources):
            if judge is not None and judge.identity == source.identity:
                said = judge.url or judge.model or judge.name
                message = (
                    f"the judge, {judge.kind} {said!r}, is one of reward.sources ({index}): it cannot see that "
                    "one being hacked; name another judge"
                )
                misfits.append(("/gate/judge", message))
                break
        if misfits:
            raise Misfits(misfits)
        return self

    def _misfits_of_processes(self) -> list[tuple[str, str]]:
        training, misfits = self.training, []
        if training.ranks > self.rollout.batch_size:
            message = (
                f"training.ranks is {training.ranks} but rollout.batch_size is only {self.rollout.batch_size}: every "
                "rank needs a row; lower training.ranks"
            )
            misfits.append(("/training/ranks", message))
        elif self.policy.dtype == "bfloat16" and training.ranks * self.update.minibatches > self.rollout.batch_size:
            message = (
                f"policy.dtype is bfloat16, where an optimizer step has a row of every rank or more: "
                f"update.minibatches {self.update.minibatches} on training.ranks {training.ranks} need as many rows as "
                f"their product, but rollout.batch_size is {self.rollout.batch_size}; lower update.minibatches"
            )
            misfits.append(("/update/minibatches", message))
        if training.engine == "deepspeed" and training.zero_stage == 0 and self.policy.dtype == "bfloat16":
            message = (
                "policy.dtype is bfloat16 and training.zero_stage 0: without ZeRO DeepSpeed adds up the gradients of "
                "microbatches in bfloat16, which loses them; set training.zero_stage to 1"
            )
            misfits.append(("/training/zero_stage", message))
        spread = self.rollout.vllm.tensor_parallel if self.rollout.engine == "vllm" else 1
        needed = training.ranks * spread
        if spread > 1 and self.resources.gpus != needed:
            message = (
                f"rollout.vllm.tensor_parallel is {spread} and training.ranks {training.ranks}, which takes "
                f"{needed} GPUs, but resources.gpus is {self.resources.gpus}; set one of them so that they fit"
            )
            misfits.append(("/rollout/vllm/tensor_parallel", message))
        elif self.resources.gpus not in (0, needed):
            message = (
                f"resources.gpus is {self.resources.gpus} but training.ranks is {training.ranks}: every rank has one "
                "GPU, or none has; make them equal"
            )
            misfits.append(("/resources/gpus", message))
        return misfits

    @property
    def data_seed(self) -> int:
        """The seed of all that an iteration draws; what is drawn once a run (adapters, held-out answers) has `seed`."""
        return self.seed if self.data.seed is None else self.data.seed

    @property
    def num_optimizer_steps(self) -> int:
        """Optimizer steps of the whole run, when none is skipped and no epoch breaks early."""
        return self.iterations * self.update.epochs * self.update.minibatches
