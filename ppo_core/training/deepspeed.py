"""Training shared out over ranks by DeepSpeed: ZeRO partitions optimizer states (1), gradients (2) and weights (3).

Losses, the tokens they are divided by, and the checkpoint format sit above the seam and are those of the local engine,
which this one must equal. What is DeepSpeed's here: where weights, gradients and moments lie, the sum of gradients over
ranks, and the clip by one joint norm.

Read against DeepSpeed 0.19.8.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from ppo_core.errors import DataError, NonFiniteError
from ppo_core.models.critic import CriticModel
from ppo_core.models.logits_head import EntropyUse
from ppo_core.models.policy import PolicyModel, PolicyOutput
from ppo_core.ranks import Ranks, backends, give_every_group_a_deadline
from ppo_core.rollout.weights import PolicyWeights, Probe, probe_of
from ppo_core.spec import RunSpec
from ppo_core.state_memory import REDUCE_BUCKET
from ppo_core.training.engine import PassSettings, StateSlice, StepReport, check_saved, pass_settings
from ppo_core.training.local import CRITIC
from ppo_core.training.microbatches import Microbatch
from ppo_core.training.partition import HeldAdamW, Partition
from ppo_core.training.schedule import learning_rate_factor

ALIGNMENT = 4096  # DeepSpeed wants even ones.


class DeepSpeedEngine:
    """Trains `policy`, and `critic` where values come from a separate one, on all ranks together.

    Each has a DeepSpeed engine of its own, so policy and shared value head have one joint gradient norm, a separate
    critic has its own.

    Raises:
        DataError: DeepSpeed is not installed.
    """

    def __init__(self, policy: PolicyModel, spec: RunSpec, ranks: Ranks, critic: CriticModel | None = None) -> None:
        self._policy, self._critic, self._spec, self._ranks = policy, critic, spec, ranks
        self._num_steps = 0
        update = spec.update
        rate, value_rate = update.learning_rate, update.value_learning_rate or update.learning_rate
        named = [(name, weight) for name, weight in policy.named_parameters() if weight.requires_grad]
        heads = [(name, weight) for name, weight in named if name.startswith("value_head.")]
        trunk = [(name, weight) for name, weight in named if not name.startswith("value_head.")]
        self._watch = _GradientWatch()
        self._actor = _Wrapped(policy, [(trunk, rate), (heads, value_rate)], spec, ranks, self._watch)
        self._value_side: _Wrapped | None = None
        self._watch.keep([weight for _, weight in heads])
        if critic is not None:
            critics = [(CRITIC + name, weight) for name, weight in critic.named_parameters()]
            self._value_side = _Wrapped(critic, [(critics, value_rate)], spec, ranks, self._watch)
        self._policy_learns = True
        give_every_group_a_deadline(spec.training.peer_timeout_s)

    @property
    def policy(self) -> PolicyModel:
        return self._policy

    @property
    def num_steps(self) -> int:
        return self._num_steps

    def pass_settings(self) -> PassSettings:
        return pass_settings(self._policy, self._critic)

    def forward(self, batch: Microbatch, *, entropy: EntropyUse, freeze_policy: bool = False) -> PolicyOutput:
        self._policy_learns = not freeze_policy
        logprobs, values, entropies = self._actor.engine(
            "predict",
            batch.input_ids,
            batch.attention_mask,
            batch.mask,
            temperature=self._spec.rollout.temperature,
            entropy=entropy,
            token_sets=batch.token_sets,
            freeze_policy=freeze_policy,
        )
        if self._value_side is not None:
            (values,) = self._value_side.engine("values", batch.input_ids, batch.attention_mask, batch.mask)
        return PolicyOutput(logprobs=logprobs, values=values, entropy=entropies)

    def backward(self, policy_loss: Tensor | None, value_loss: Tensor) -> None:
        # ZeRO averages over ranks, while every loss is divided by the tokens of all of them already.
        size = self._ranks.size
        if self._value_side is not None:
            self._value_side.engine.backward(value_loss * size)
            if policy_loss is not None:
                self._actor.engine.backward(policy_loss * size)
            return
        self._actor.engine.backward((value_loss if policy_loss is None else policy_loss + value_loss) * size)

    def step(self) -> StepReport:
        bad, head_norm = self._watch.over_ranks(self._ranks)
        if bad:
            self._finish(held=True)
            return StepReport(math.nan, math.nan, False, math.nan, math.nan)
        factor = learning_rate_factor(self._num_steps, self._spec.num_optimizer_steps, self._spec.update)
        rates = [rate for side in self._sides for rate in side.set_rates(factor)]
        norms = self._finish(held=False)
        applied = [math.isfinite(norm) for norm in norms]
        if any(applied) and not all(applied):
            raise NonFiniteError(
                f"gradient norms are {norms}: policy and critic were to step together, and only one could",
                hint="Go back to the last checkpoint and lower update.learning_rate.",
            )
        self._num_steps += all(applied)
        value_norm = norms[-1] if self._value_side is not None else head_norm
        grad_norm = norms[0] if self._actor in self._sides else 0.0
        return StepReport(grad_norm, value_norm, all(applied), rates[0], rates[-1])

    def discard_gradients(self) -> None:
        self._watch.over_ranks(self._ranks)
        self._finish(held=True)

    def weights(self) -> PolicyWeights:
        if self._spec.training.zero_stage < 3:
            return PolicyWeights(self._policy)
        return PolicyWeights(self._policy, self._gathered, self._ranks.together)

    def probe(self) -> Probe:
        return probe_of(self._policy, self._actor.logprobs)

    def export_state(self) -> dict[str, StateSlice]:
        sides = (self._actor, self._value_side)
        return {key: part for side in sides if side is not None for key, part in side.partition.export().items()}

    def load_state(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        sides = [side for side in (self._actor, self._value_side) if side is not None]
        check_saved(tensors, {name: shape for side in sides for name, shape in side.partition.shapes().items()})
        for side in sides:
            side.partition.load(tensors)
        self._num_steps = num_steps

    @property
    def _sides(self) -> list[_Wrapped]:
        """What is to step: not a policy that has no gradient at all."""
        if self._value_side is None:
            return [self._actor]
        return [self._actor, self._value_side] if self._policy_learns else [self._value_side]

    def _finish(self, held: bool) -> list[float]:
        """Reduce, clip and step, or with `held` only clear the gradients; returns the norms before clipping."""
        for side in self._sides:
            side.hold(trunk=held or not self._policy_learns, heads=held)
        return [side.step() for side in self._sides]

    @contextmanager
    def _gathered(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        """Parameters are whole for the time this is entered. A rank that has no room for them says so before the others
        wait for it."""
        self._ranks.together(lambda: _require_room(parameters))
        with _deepspeed().zero.GatheredParameters(parameters):
            yield


def _require_room(parameters: list[nn.Parameter]) -> None:
    """What gathering these will take can be had; the allocator keeps it for that.

    Raises:
        RuntimeError: as torch has no memory for it.
    """
    room = [torch.empty(one.ds_numel, dtype=one.dtype, device=one.device) for one in parameters]  # type: ignore[attr-defined]
    del room


class _Wrapped:
    """A model under a DeepSpeed engine, with the optimizer groups (named weights, base rate) it was given."""

    def __init__(
        self,
        model: nn.Module,
        groups: list[tuple[list[tuple[str, nn.Parameter]], float]],
        spec: RunSpec,
        ranks: Ranks,
        watch: _GradientWatch,
    ) -> None:
        groups = [group for group in groups if group[0]]
        self._base_rates = [rate for _, rate in groups]
        stage, max_norm = spec.training.zero_stage, spec.update.max_grad_norm
        self._optimizer = HeldAdamW(
            [{"params": [weight for _, weight in named], "lr": rate} for named, rate in groups],
            # Only without ZeRO does the optimizer see whole gradients; elsewhere DeepSpeed clips.
            max_grad_norm=max_norm if stage == 0 else None,
        )
        for named, _ in groups:
            watch.look_at([weight for _, weight in named])
        self.engine: Any = _deepspeed().initialize(
            model=_Calls(model).eval(),
            optimizer=self._optimizer,
            config=_config(spec, sum(weight.numel() for named, _ in groups for _, weight in named)),
            dist_init_required=False,
        )[0]
        self.engine.eval()
        self.partition = Partition([named for named, _ in groups], self._optimizer, self.engine.optimizer, stage, ranks)

    def set_rates(self, factor: float) -> list[float]:
        rates = [rate * factor for rate in self._base_rates]
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        return rates

    def hold(self, trunk: bool, heads: bool) -> None:
        """Which groups keep weights and moments through the next step.

        A group by itself goes by `heads`: a critic's, or that of a policy beside one, which steps only if it learns.
        """
        held = [trunk, heads][-len(self._base_rates) :] if len(self._base_rates) == 2 else [heads]
        for group, each in zip(self._optimizer.param_groups, held, strict=True):
            group["held"] = each

    def step(self) -> float:
        """The joint norm before clipping; NaN where DeepSpeed found it not finite and left everything as it was."""
        self.engine.step()
        if not self.engine.was_step_applied():
            return math.nan
        norm = self._optimizer.norm if self._optimizer.norm is not None else self.engine.get_global_grad_norm()
        return float(norm)

    def logprobs(self, *args: Any, **kwargs: Any) -> Tensor:
        """The policy's `logprobs`, called so that partitioned weights are made whole."""
        (found,) = self.engine("logprobs", *args, **kwargs)
        return found  # type: ignore[no-any-return]


class _Calls(nn.Module):
    """What DeepSpeed calls: it hooks one `forward`, and its backward hooks look for tensors in tuples only."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, method: str, *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
        found = getattr(self.model, method)(*args, **kwargs)
        return (found.logprobs, found.values, found.entropy) if isinstance(found, PolicyOutput) else (found,)


class _GradientWatch:
    """Sees every gradient of this rank's microbatches before DeepSpeed takes it: is one not finite?

    Of the weights in `keep` it adds the gradients up, for a norm of their own.
    """

    def __init__(self) -> None:
        self._bad: Tensor | None = None
        self._kept: dict[int, Tensor] = {}

    def look_at(self, weights: list[nn.Parameter]) -> None:
        for weight in weights:
            weight.register_hook(self._see)  # type: ignore[no-untyped-call]

    def keep(self, weights: list[nn.Parameter]) -> None:
        for number, weight in enumerate(weights):
            weight.register_hook(lambda grad, number=number: self._add(number, grad))  # type: ignore[no-untyped-call]

    def over_ranks(self, ranks: Ranks) -> tuple[bool, float]:
        """Whether any rank saw a gradient that is not finite, and the norm of the kept gradients; begins anew."""
        bad = self._bad is not None and bool(self._bad)
        kept = [self._kept[number].cpu() for number in sorted(self._kept)]
        self._bad, self._kept = None, {}
        flags = ranks.add(torch.tensor([float(bad)]))
        total = [ranks.add(grad) / ranks.size for grad in kept]
        return bool(flags > 0), float(nn.utils.get_total_norm(total)) if total else 0.0

    def _see(self, grad: Tensor) -> None:
        bad = ~torch.isfinite(grad).all()
        self._bad = bad if self._bad is None else self._bad | bad

    def _add(self, number: int, grad: Tensor) -> None:
        grad = grad.detach().float()
        self._kept[number] = self._kept[number] + grad if number in self._kept else grad.clone()


def _config(spec: RunSpec, num_elements: int) -> dict[str, Any]:
    training = spec.training
    bucket = -(-min(num_elements, REDUCE_BUCKET) // ALIGNMENT) * ALIGNMENT
    zero: dict[str, Any] = {
        "stage": training.zero_stage,
        "overlap_comm": False,
        # Allocated anew at every step, at full size however small the model is.
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        # Every weight is partitioned, however small: what a rank holds is then what the estimate says.
        "stage3_param_persistence_threshold": 0,
        # DeepSpeed's own linear map ignores the dtypes that a float32 value head mixes.
        "memory_efficient_linear": False,
    }
    if training.offload == "optimizer":
        zero["offload_optimizer"] = {"device": "cpu"}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # Any number of backward passes a step; the loss is scaled above the seam.
        "managed_gradient_accumulation": False,
        # Without ZeRO the optimizer clips: DeepSpeed would not tell the norm.
        "gradient_clipping": spec.update.max_grad_norm if training.zero_stage else 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }
    if spec.policy.dtype == "bfloat16":
        config["bf16"] = {"enabled": True, "check_grad_overflow": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        config["communication_data_type"] = "fp32"
    return config


def _deepspeed() -> Any:
    """DeepSpeed, set so that it compiles nothing and reads no launcher's variables."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
    except ImportError as error:
        raise DataError(
            f"training.engine is deepspeed, which cannot be imported: {error}",
            hint="Install it (make setup-engines), or set training.engine to local and training.ranks to 1.",
        ) from error
    # Two ranks on one machine would else compile a transport of their own at the first exchange.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not dist.is_initialized():  # One rank alone: DeepSpeed needs a group all the same.
        dist.init_process_group(backends(), store=HashStore(), rank=0, world_size=1)
    return deepspeed
