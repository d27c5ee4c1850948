"""Where ZeRO keeps a model's float32 weights and moments, by parameter name: this rank's slices of each, out and in.

ZeRO lays the parameters of an optimizer group end to end and cuts the row into one part a rank (stages 1 and 2), or
cuts every parameter (stage 3). Without ZeRO every rank holds all of them.

Read against DeepSpeed 0.19.8: `deepspeed.utils.tensor_fragment` maps a parameter to its part of the flat row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ppo_core.ranks import Ranks
from ppo_core.training.engine import StateSlice

MOVING = ("exp_avg", "exp_avg_sq")


class HeldAdamW(torch.optim.AdamW):
    """AdamW without weight decay that leaves groups marked `held` as they are, moments and step count included.

    With `max_grad_norm` it clips the gradients of all groups by their joint norm first, and a norm that is not finite
    holds every group; `norm` is the one before that.
    """

    def __init__(self, groups: list[dict[str, Any]], max_grad_norm: float | None) -> None:
        super().__init__([{**group, "held": False} for group in groups], weight_decay=0.0, fused=True)
        self._max_grad_norm = max_grad_norm
        self.norm: float | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        stepping = [group for group in groups if not group["held"]]
        if self._max_grad_norm is not None:
            weights = [weight for group in groups for weight in group["params"]]
            self.norm = float(nn.utils.clip_grad_norm_(weights, self._max_grad_norm))
            if not torch.isfinite(torch.tensor(self.norm)):
                stepping = []
        if stepping:
            self.param_groups = stepping
            try:
                super().step()
            finally:
                self.param_groups = groups


class Partition:
    """This rank's slices of the trained parameters of one DeepSpeed engine.

    Args:
        groups: the optimizer groups' parameters with their names in a checkpoint.
        optimizer: the one that holds the moments.
        zero: DeepSpeed's wrapper around it; the optimizer itself at stage 0.
        stage: of ZeRO.
        ranks: who shares the model.
    """

    def __init__(
        self,
        groups: list[list[tuple[str, nn.Parameter]]],
        optimizer: HeldAdamW,
        zero: Any,
        stage: int,
        ranks: Ranks,
    ) -> None:
        self._groups, self._optimizer, self._zero, self._stage, self._ranks = groups, optimizer, zero, stage, ranks

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the whole parameters."""
        return {name: _shape(weight) for group in self._groups for name, weight in group}

    def export(self) -> dict[str, StateSlice]:
        """This rank's slices of weights and moments, float32; see `TrainEngine.export_state`."""
        found: dict[str, StateSlice] = {}
        for number, group in enumerate(self._groups):
            steps = self._step_of(number)
            for place, (name, weight) in enumerate(group):
                parts = self._slices(number, weight, place)
                if not parts or parts["master"][1].numel() == 0:
                    continue
                start = parts["master"][0]
                for key, (_, values) in parts.items():
                    found[f"{key}/{name}"] = StateSlice(_shape(weight), start, values.detach())
                if start == 0 and steps is not None:
                    found[f"step/{name}"] = StateSlice((), 0, steps.clone())
        return found

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over this rank's slices of whole tensors; moments that are not there begin anew."""
        for number, group in enumerate(self._groups):
            steps = [tensors[f"step/{name}"] for name, _ in group if f"step/{name}" in tensors]
            self._begin_moments(number, max(steps, default=torch.tensor(0.0)))
            for name, weight in group:
                for key, (start, values) in self._slices(number, weight).items():
                    whole = tensors.get(f"{key}/{name}")
                    if whole is None:
                        values.zero_()
                    else:
                        values.copy_(whole.flatten()[start : start + values.numel()].view(values.shape))
        self._copy_to_weights()

    # Where things lie, by stage

    def _flats(self, number: int) -> list[Tensor]:
        """The tensors that the optimizer moves for one group."""
        if self._stage == 0:
            return [weight for _, weight in self._groups[number]]
        if self._stage == 3:
            of_group = self._zero.sub_group_to_group_id
            flats = self._zero.fp32_partitioned_groups_flat
            return [flat for sub, flat in enumerate(flats) if of_group[sub] == number]
        held = getattr(self._zero, "single_partition_of_fp32_groups", None)
        return [(self._zero.fp32_groups_flat_partition if held is None else held)[number]]

    def _step_of(self, number: int) -> Tensor | None:
        state = self._optimizer.state.get(self._flats(number)[0])
        return state["step"].detach().clone().float() if state else None

    def _begin_moments(self, number: int, steps: Tensor) -> None:
        for flat in self._flats(number):
            self._optimizer.state[flat] = {
                "step": steps.detach().clone().float().to(flat.device),
                **{key: torch.zeros_like(flat, dtype=torch.float32) for key in MOVING},
            }

    def _slices(self, number: int, weight: nn.Parameter, place: int | None = None) -> dict[str, tuple[int, Tensor]]:
        """`{kind: (first element, values)}` of what this rank holds of one parameter; the moments once there are any.

        With `place`, what is held whole by every rank is one rank's to give: the parameters go round.
        """
        if self._stage == 0:
            if place is not None and place % self._ranks.size != self._ranks.rank:
                return {}
            state = self._optimizer.state.get(weight, {})
            return {"master": (0, weight.data), **{key: (0, state[key]) for key in MOVING if key in state}}
        if self._stage == 3:
            return self._slices_of_partitioned(weight)
        mapping = weight._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return {}
        # Not by DeepSpeed's own map of moments: it is drawn at the first group's first step, before others have any.
        own = mapping.hp_fragment_address
        (flat,) = self._flats(number)
        return self._parts_of(flat, mapping.lp_fragment_address.start, own.start, own.numel)

    def _slices_of_partitioned(self, weight: Any) -> dict[str, tuple[int, Tensor]]:
        size = weight.ds_tensor.numel()  # the last rank's part may reach beyond the parameter
        start = size * self._ranks.rank
        count = max(0, min(size, weight.ds_numel - start))
        sub, offset, _ = self._zero.grad_position[self._zero.get_param_id(weight)]
        return self._parts_of(self._zero.fp32_partitioned_groups_flat[sub], start, offset, count)

    def _parts_of(self, flat: Tensor, start: int, offset: int, count: int) -> dict[str, tuple[int, Tensor]]:
        """Elements `offset` on of a flat row and of its moments, which are a parameter's from `start` on."""
        state = self._optimizer.state.get(flat, {})
        kinds = {"master": flat, **{key: state[key] for key in MOVING if key in state}}
        return {kind: (start, values.narrow(0, offset, count)) for kind, values in kinds.items()}

    def _copy_to_weights(self) -> None:
        if self._stage in (1, 2):
            self._zero.update_lp_params()
        elif self._stage == 3:
            for sub in range(len(self._zero.fp32_partitioned_groups_flat)):
                self._zero._reassign_or_swap_out_partitioned_parameters(sub)


def _shape(weight: Any) -> tuple[int, ...]:
    return tuple(getattr(weight, "ds_shape", weight.shape))
