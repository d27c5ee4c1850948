"""Builds a trainer from a spec: loads what it names, and takes over a checkpoint if there is one to start from."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from ppo_core.checkpoints import TrainerState, load_checkpoint
from ppo_core.control import Control
from ppo_core.data.prompts import PromptSource
from ppo_core.diagnostics.carried import watch_to_start_from
from ppo_core.diagnostics.limit_meter import LimitMeter
from ppo_core.errors import DataError
from ppo_core.evaluation.gate_state import gate_to_start_from
from ppo_core.evaluation.held_out import HeldOut
from ppo_core.iteration import Models
from ppo_core.kl_controller import coef_to_start_from
from ppo_core.models.loading import load_critic, load_policy, load_reference, load_tokenizer
from ppo_core.ranks import ALONE, Ranks
from ppo_core.rollout.engine import RolloutEngine
from ppo_core.rollout.shared import SharedEngine
from ppo_core.rollout.transformers_engine import TransformersEngine
from ppo_core.rollout.vllm_engine import VLLMEngine
from ppo_core.rundir import Journal, SegmentDir
from ppo_core.score_shaping import moments_to_start_from
from ppo_core.scoring.combine import Reward, load_judge
from ppo_core.scoring.pair_judge import load_pair_judge
from ppo_core.scoring.shared import SharedReward
from ppo_core.spec import RunSpec
from ppo_core.trainer import Trainer
from ppo_core.training.engine import TrainEngine
from ppo_core.training.local import LocalEngine


def assemble_trainer(
    segment: SegmentDir,
    spec: RunSpec,
    checkpoint: Path | None,
    journal: Journal,
    control: Control,
    ranks: Ranks = ALONE,
) -> Trainer:
    """A trainer that stands where `checkpoint` does, or at the start of the run. All ranks call it together.

    The reference is always the policy that the spec names, whatever the checkpoint.

    Raises:
        DataError: a model, tokenizer or prompt file cannot be used.
        CheckpointError: the checkpoint is damaged, or of another model.
    """
    # Without it deterministic mode refuses every matrix product on a GPU; cuBLAS reads it when it is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Whoever follows the journal draws progress; a log wants lines.
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    device = _device(spec)
    tokenizer = load_tokenizer(spec.policy.model)
    layout = spec.update.row_layout
    trainer = _train_engine(spec, device, ranks)
    state, kept_spec = TrainerState(kl_coef=spec.kl.coef), dict[str, Any]()
    if checkpoint is not None:
        kept, kept_spec = load_checkpoint(checkpoint, trainer, spec, ranks)
        state = _under(spec, kept, kept_spec, journal)
    prompts = PromptSource(
        spec.data.prompts,
        tokenizer,
        spec.data.max_prompt_tokens,
        spec.data_seed,
        too_long=spec.data.too_long,
        min_prompts=spec.rollout.batch_size,
    )
    _tell_too_long(spec, "data.prompts", prompts, state.iteration, journal)
    reward = _shared(lambda: Reward.of(spec.reward), ranks)
    models = Models(
        trainer=trainer,
        reference=load_reference(spec.policy, layout).to(device),
        reward=reward,
        engine=_rollout_engine(segment, spec, trainer, tokenizer, state.policy_version, ranks),
        pad_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0,
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        ranks=ranks,
    )
    held_out = _held_out(spec, tokenizer, reward, ranks)
    if held_out is not None:
        _tell_too_long(spec, "data.held_out", held_out.source, state.iteration, journal)
        if checkpoint is not None:
            state = _with_gate(spec, state, kept_spec, held_out.gate_prompts, journal)
    meter = LimitMeter.of(spec, trainer.policy.device)
    return Trainer(segment, spec, models, prompts, held_out, tokenizer, meter, state, journal, control)


def _train_engine(spec: RunSpec, device: torch.device, ranks: Ranks) -> TrainEngine:
    layout = spec.update.row_layout
    policy = load_policy(spec.policy, layout, spec.seed).to(device)
    critic = load_critic(spec.policy, layout)
    critic = None if critic is None else critic.to(device)
    if spec.training.engine == "local":
        return LocalEngine(policy, spec, critic)
    from ppo_core.training.deepspeed import DeepSpeedEngine  # seconds to import, and not always installed

    return DeepSpeedEngine(policy, spec, ranks, critic)


def _rollout_engine(
    segment: SegmentDir, spec: RunSpec, trainer: TrainEngine, tokenizer: Any, version: int, ranks: Ranks
) -> RolloutEngine:
    """The spec's engine, holding the trainer's weights as they are now, which is proved."""

    def own() -> RolloutEngine | None:
        if spec.rollout.engine == "vllm":
            return _vllm_engine(segment, spec, trainer, tokenizer, ranks)
        policy = trainer.policy
        if spec.training.zero_stage == 3:
            # Weights in parts cannot be generated with, and ranks would have to go step by step: each gets a copy.
            policy = load_reference(spec.policy, spec.update.row_layout).to(policy.device)
        return TransformersEngine(policy, tokenizer, spec.rollout, version=version)

    engine = own() if ranks.size == 1 else SharedEngine(own, ranks)
    assert engine is not None  # Rank 0 has one.
    try:
        engine.sync_weights(trainer.weights(), trainer.probe(), version)
    except BaseException:
        engine.close()
        raise
    return engine


def _vllm_engine(
    segment: SegmentDir, spec: RunSpec, trainer: TrainEngine, tokenizer: Any, ranks: Ranks
) -> VLLMEngine | None:
    """On GPUs every rank has an engine on its own one; on a CPU, and with servers, rank 0's serves all."""
    serves_all = trainer.policy.device.type == "cpu" or spec.rollout.vllm.servers
    if serves_all and not ranks.is_first:
        return None
    return VLLMEngine(
        trainer.policy,
        tokenizer,
        spec.rollout,
        max_prompt_tokens=spec.data.max_prompt_tokens,
        logs=segment.logs,
        label="vllm" if ranks.is_first else f"vllm-rank-{ranks.rank}",
    )


def _held_out(spec: RunSpec, tokenizer: Any, reward: Reward | SharedReward, ranks: Ranks) -> HeldOut | None:
    if spec.data.held_out is None:
        return None
    judge = spec.gate.judge
    if judge is None:
        return HeldOut(spec, tokenizer, reward, None)
    if judge.kind == "openai":
        return HeldOut(spec, tokenizer, reward, None, load_pair_judge(judge, spec.seed, ranks))
    own = reward if isinstance(reward, Reward) else reward.own
    return HeldOut(spec, tokenizer, reward, _shared(lambda: load_judge(judge, own), ranks))


def _shared(load: Callable[[], Reward], ranks: Ranks) -> Reward | SharedReward:
    return load() if ranks.size == 1 else SharedReward(load, ranks)


def _under(spec: RunSpec, kept: TrainerState, kept_spec: dict[str, Any], journal: Journal) -> TrainerState:
    """A checkpoint's state under a spec that a roll back may have changed: what the change makes void begins anew."""
    moments = moments_to_start_from(kept.score_moments, kept_spec, spec.reward)
    if spec.reward.normalize and moments is None:
        message = (
            "reward.normalize begins anew: the checkpoint holds no running mean and deviation of scores that are made "
            "by these reward.sources and this reward.length_baseline"
        )
        journal.append("note", kept.iteration, {"level": "warning", "message": message})
    alerts, because = watch_to_start_from(kept.alerts, kept_spec, spec)
    if because:
        message = f"what is usual for this run is learned anew where it depends on {', '.join(because)}"
        journal.append("note", kept.iteration, {"level": "info", "message": message})
    coef = coef_to_start_from(kept.kl_coef, kept_spec, spec.kl)
    return kept.after(kl_coef=coef, score_moments=moments, alerts=alerts)


def _with_gate(
    spec: RunSpec, state: TrainerState, kept_spec: dict[str, Any], prompts: list[str], journal: Journal
) -> TrainerState:
    """The state with what its gate may still be compared with. Without that the checkpoint's policy is the start."""
    gate = gate_to_start_from(state.gate, kept_spec, spec, prompts)
    if gate is None:
        if spec.gate.judge is not None and state.iteration:  # At 0 that policy is the start: nothing was judged.
            message = (
                "the gate begins anew: the checkpoint holds no answers to these held-out prompts, so later ones are "
                "compared with those of the checkpoint's policy in the starting policy's place"
            )
            journal.append("note", state.iteration, {"level": "warning", "message": message})
        return state.after(gate=None, evaluation_owed=True)
    return state.after(gate=gate)


def _tell_too_long(spec: RunSpec, field: str, prompts: PromptSource, iteration: int, journal: Journal) -> None:
    """A note of how many prompts the limit touches, before anything is trained."""
    if not prompts.num_too_long:
        return
    done = "lose their beginning" if spec.data.too_long == "cut" else f"are left out; {len(prompts)} remain"
    message = (
        f"{prompts.num_too_long} prompts of {field} are longer than data.max_prompt_tokens "
        f"{spec.data.max_prompt_tokens} and {done}"
    )
    journal.append("note", iteration, {"level": "warning", "message": message})


def _device(spec: RunSpec) -> torch.device:
    """Where policy and reference live. Reward models stay on the CPU.

    Raises:
        DataError: the spec asks for a GPU and there is none to be seen.
    """
    if spec.resources.gpus == 0:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DataError(
            f"resources.gpus is {spec.resources.gpus}, but torch {torch.__version__} sees no CUDA device",
            hint="Set resources.gpus to 0, or run on a machine with a GPU and a CUDA build of torch.",
        )
    return torch.device("cuda")
